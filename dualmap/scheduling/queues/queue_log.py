"""The log of an instance's queue, for people: what went past a held request, and why it was deferred.

The store keeps the last ``QUEUE_LOG`` steps of each queue: requests that were granted from it or dispatched past it,
deferred, or moved to another queue. Only steps that concern held requests are written, by the scripts that make them
(``statestore/lua/shared/queue_log.lua``), so a request that finds room pays nothing. It is read when a person asks, by
``wait_in_queue``; a replica or leader that made the steps may be gone by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from enum import StrEnum

from dualmap.scheduling.tenants.classes import rank_of_band
from dualmap.scheduling.values import value

QUEUE_LOG = 2048
"""Steps that the log of a queue keeps at least: about 100 KB of the store."""


class StepKind(StrEnum):
    """An event of a request in a queue."""

    GRANTED = "granted"
    """The request was dispatched from the queue."""
    PASSED = "passed"
    """The request was dispatched when it was placed, while others were held."""
    DEFERRED = "deferred"
    MOVED = "moved"
    """The request left for another instance's queue."""


@value
class QueueStep:
    """One step of the log."""

    kind: StepKind
    request_id: str
    at_ms: int
    """The time of the store."""
    enqueued_ms: int = 0
    """The first reservation of a request that was dispatched."""
    band: int = 0
    tenant: str = ""
    _: KW_ONLY
    tokens: int = 0
    """Prompt tokens to prefill, of a request that was deferred."""
    tokens_per_s: float = 0.0
    """The prefill rate of the instance then."""
    other: str = ""
    """The replica whose plan deferred it, empty for the leader; or the instance that it moved to."""


@value
class WentAhead:
    """Requests of one class and tenant that were dispatched while another one was held."""

    class_rank: int
    tenant: str
    requests: int
    came_later: int
    """Requests among them that came after it: they overtook it."""


@value
class Deferral:
    """When a plan deferred a request, and by which figures."""

    after_s: float
    """The age of the request then."""
    by: str
    """The replica whose plan it was; empty: the leader."""
    takes_s: float
    """The prefill of the request itself."""
    left_s: float
    """The rest of the SLO; negative: the deadline had passed."""


class WaitEnd(StrEnum):
    """How a wait in a queue ended."""

    GRANTED = "granted"
    MOVED = "moved"
    NOT_LOGGED = "not logged"
    """The request still waits, or ended without a grant: its client left, it was refused, or its instance failed."""


@value
class Wait:
    """The events of a request while it was held in one queue."""

    instance_id: str
    end: WaitEnd
    ended_ms: int
    """The time of the last step that was looked at."""
    ahead: tuple[WentAhead, ...] = ()
    deferral: Deferral | None = None
    moved_to: str = ""
    is_whole: bool = True
    """Whether the log reaches back to its beginning."""

    @property
    def went_ahead(self) -> int:
        """Requests that were dispatched while it was held."""
        return sum(each.requests for each in self.ahead)

    @property
    def overtaken_by(self) -> int:
        """Requests among them that came after it."""
        return sum(each.came_later for each in self.ahead)


def wait_in_queue(
    instance_id: str,
    request_id: str,
    slo_ms: int,
    enqueued_ms: int,
    since_ms: int,
    steps: Sequence[QueueStep],
    until_ms: int | None = None,
) -> Wait:
    """The wait of a request in the queue of an instance, by the steps that the store has of it, oldest first.

    Args:
        slo_ms: its SLO, counted from ``enqueued_ms``, its first reservation.
        since_ms: the time at which it entered this queue.
        until_ms: the time at which it was over, where it has ended: its end is no step.
    """
    is_whole = len(steps) < QUEUE_LOG or steps[0].at_ms <= since_ms
    counts: dict[tuple[int, str], list[int]] = {}
    deferral: Deferral | None = None
    end, moved_to, ended_ms = WaitEnd.NOT_LOGGED, "", since_ms
    for step in steps:
        if step.at_ms < since_ms:
            continue
        if until_ms is not None and step.at_ms > until_ms:
            break
        ended_ms = step.at_ms
        if step.request_id == request_id:
            if step.kind is StepKind.DEFERRED:
                takes_s = step.tokens / max(1.0, step.tokens_per_s)
                left_s = (enqueued_ms + slo_ms - step.at_ms) / 1000
                deferral = Deferral((step.at_ms - enqueued_ms) / 1000, step.other, takes_s, left_s)
                continue
            is_move = step.kind is StepKind.MOVED
            end, moved_to = (WaitEnd.MOVED, step.other) if is_move else (WaitEnd.GRANTED, "")
            break
        if step.kind in (StepKind.GRANTED, StepKind.PASSED):
            count = counts.setdefault((rank_of_band(step.band), step.tenant), [0, 0])
            count[0] += 1
            count[1] += step.enqueued_ms > enqueued_ms
    ahead = [WentAhead(rank, tenant, *count) for (rank, tenant), count in counts.items()]
    ahead.sort(key=lambda each: (-each.came_later, -each.requests, each.class_rank, each.tenant))
    return Wait(instance_id, end, ended_ms, tuple(ahead), deferral, moved_to, is_whole)
