"""Why a request was held: when it was deferred, and what went past it, by class and tenant.

Read from the logs of queues in the store when a person asks (``scheduling.queues.queue_log``): a request pays nothing
for it, and the replica that made the plans may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.requests.explain import Explanation, PlacementRound
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.queues.queue_log import Deferral, Wait, WaitEnd, WentAhead
from dualmap.scheduling.settings import PriorityClassSettings
from dualmap.scheduling.tenants.classes import class_name
from dualmap.statestore.errors import StoreError

NAMED = 4
"""Classes and tenants that a sentence names; all are in the figures."""


async def waits_of(explanation: Explanation, pool: ServedPool) -> dict[str, Any]:
    """The waits of a request in queues, in their order, as plain values with sentences; and why the store could not be
    read, where that is so."""
    waits: list[dict[str, Any]] = []
    try:
        for each in explanation.rounds:
            if each.status is PlaceStatus.HELD:
                waits += [_wait_fields(wait, explanation, pool) for wait in await _waits_in(each, explanation, pool)]
    except StoreError as error:
        return {"waits": waits, "waits_unknown": f"the logs of queues cannot be read: {error}"}
    return {"waits": waits}


async def _waits_in(each: PlacementRound, explanation: Explanation, pool: ServedPool) -> Sequence[Wait]:
    course, (enqueued_ms, placed_ms) = explanation.course, each.times_ms
    # The store reserved between the request's start and its reply, so its end counts from the start at the latest.
    until_ms = None if course.done_s is None else enqueued_ms + round(course.done_s * 1000)
    slo_ms = round(course.slo_s * 1000)
    return await pool.store.queues.waits(
        explanation.origin.request_id, each.decision.instance_id, slo_ms, enqueued_ms, placed_ms, until_ms
    )


def _wait_fields(wait: Wait, explanation: Explanation, pool: ServedPool) -> dict[str, Any]:
    classes = pool.scheduling.classes
    ahead = [
        {"priority_class": class_name(classes, each.class_rank), "tenant": each.tenant}
        | {"requests": each.requests, "came_later": each.came_later}
        for each in wait.ahead
    ]
    return {
        "instance_id": wait.instance_id,
        "end": wait.end,
        "moved_to": wait.moved_to,
        "went_ahead": wait.went_ahead,
        "overtaken_by": wait.overtaken_by,
        "ahead": ahead,
        "deferral": None if wait.deferral is None else asdict(wait.deferral),
        "is_whole": wait.is_whole,
        "why": reasons(wait, explanation, classes),
    }


def reasons(wait: Wait, explanation: Explanation, classes: Sequence[PriorityClassSettings]) -> list[str]:
    """The reasons of a wait, in sentences."""
    sentences, terms = [], explanation.terms
    if classes and classes[min(terms.class_rank, len(classes) - 1)].fills_idle:
        sentences.append(
            f"Its class {terms.priority_class} fills idle room: it waits until an instance has nothing else to"
            " prefill and less than half of its KV memory in use."
        )
    elif wait.deferral is not None:
        sentences.append(_deferred(wait.deferral, explanation.course.slo_s, with_classes=bool(classes)))
    sentences.append(_went_ahead(wait, classes))
    if wait.end is WaitEnd.MOVED:
        sentences.append(f"Then it moved to the queue of {wait.moved_to}.")
    if not wait.is_whole:
        sentences.append("The log of the queue does not reach back to its beginning: there may have been more.")
    return sentences


def _deferred(deferral: Deferral, slo_s: float, *, with_classes: bool) -> str:
    by = f"a plan of {deferral.by}" if deferral.by else "a plan of the leader"
    left = (
        f"its deadline had passed {-deferral.left_s:.1f} s before"
        if deferral.left_s <= 0
        else f"{deferral.left_s:.1f} s of its SLO of {slo_s:g} s were left, and the engine's step was under way"
    )
    others = "of its class that could" if with_classes else "that could"
    return (
        f"Deferred {deferral.after_s:.1f} s after it was placed, by {by}: its prefill takes {deferral.takes_s:.1f} s"
        f" there, and {left}. So it could not be on time, and waited behind all requests {others}."
    )


def _went_ahead(wait: Wait, classes: Sequence[PriorityClassSettings]) -> str:
    if not wait.went_ahead:
        return "No request went before it: it waited for the engine, or for KV memory."
    of = [f"{each.requests} of {_sender(each, classes)}" for each in wait.ahead[:NAMED]]
    more = sum(each.requests for each in wait.ahead[NAMED:])
    of += [f"{more} of others"] if more else []
    named = f": {', '.join(of)}" if classes or any(each.tenant for each in wait.ahead) else ""
    plural = "requests" if wait.went_ahead > 1 else "request"
    return f"{wait.went_ahead} {plural} went before it, {wait.overtaken_by} of which had come later{named}."


def _sender(ahead: WentAhead, classes: Sequence[PriorityClassSettings]) -> str:
    tenant = f"tenant {ahead.tenant}" if ahead.tenant else "no tenant"
    return f"class {class_name(classes, ahead.class_rank)} and {tenant}" if classes else tenant
