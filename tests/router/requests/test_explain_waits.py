"""Why a request was held, in sentences and figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dualmap.router.requests.explain import Answer, Course, Explanation, KeyedPrompt, Origin, PlacementRound, Terms
from dualmap.router.requests.explain_waits import NAMED, reasons, waits_of
from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.queues.queue_log import (
    Deferral,
    QueueStep,
    StepKind,
    Wait,
    WaitEnd,
    WentAhead,
    wait_in_queue,
)
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools

CLASSES = (PriorityClassSettings(name="high"), PriorityClassSettings(name="low"))
FILLS = (CLASSES[0], PriorityClassSettings(name="low", fills_idle=True))
EXPLAINED = Explanation(
    Origin("slow", "m", "default", tenant="acme"),
    Terms("p", priority_class="low", class_rank=1),
    KeyedPrompt(100, 1),
    Course(0.0, 5.0),
    Answer(),
)
WAIT = Wait("a", WaitEnd.GRANTED, 9000)


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(block_tokens=16, classes=CLASSES)


def test_a_deferral_says_when_by_whom_and_by_which_figures() -> None:
    told = reasons(replace(WAIT, deferral=Deferral(3.0, "router-1", 2.5, 2.0)), EXPLAINED, CLASSES)

    assert told[0] == (
        "Deferred 3.0 s after it was placed, by a plan of router-1: its prefill takes 2.5 s there, and 2.0 s of its SLO"
        " of 5 s were left, and the engine's step was under way. So it could not be on time, and waited behind all"
        " requests of its class that could."
    )
    passed = reasons(replace(WAIT, deferral=Deferral(6.0, "", 2.5, -1.0)), EXPLAINED, ())[0]
    assert "by a plan of the leader: its prefill takes 2.5 s there, and its deadline had passed 1.0 s before" in passed
    assert passed.endswith("waited behind all requests that could.")


def test_what_went_ahead_is_named_by_class_and_tenant() -> None:
    ahead = (WentAhead(0, "search", 7, 6), WentAhead(1, "", 1, 0))

    assert reasons(replace(WAIT, ahead=ahead), EXPLAINED, CLASSES) == [
        "8 requests went before it, 6 of which had come later: 7 of class high and tenant search, 1 of class low and no"
        " tenant."
    ]
    assert reasons(replace(WAIT, ahead=ahead[1:]), EXPLAINED, ()) == [
        "1 request went before it, 0 of which had come later."
    ]
    assert reasons(WAIT, EXPLAINED, ()) == ["No request went before it: it waited for the engine, or for KV memory."]


def test_a_sentence_names_a_few_and_counts_the_others() -> None:
    many = tuple(WentAhead(0, f"t{number}", 2, 0) for number in range(NAMED + 3))

    (told,) = reasons(replace(WAIT, ahead=many), EXPLAINED, CLASSES)

    assert told.endswith("2 of class high and tenant t3, 6 of others.")


def test_a_class_that_fills_idle_room_a_move_and_a_log_that_was_cut_are_told() -> None:
    moved = replace(WAIT, end=WaitEnd.MOVED, moved_to="b", is_whole=False)

    told = reasons(moved, EXPLAINED, FILLS)

    assert told[0].startswith("Its class low fills idle room: it waits until an instance has nothing else to prefill")
    assert told[2:] == [
        "Then it moved to the queue of b.",
        "The log of the queue does not reach back to its beginning: there may have been more.",
    ]


@pytest.fixture
async def slow(start_runtime: Any, clock: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A replica whose one instance is full, and a held request of the lower class that it knows."""
    runtime = await start_runtime(instances=(tools.spec("a", dispatch_window_tokens=1),))
    first = await runtime.intake.place(tools.request("x" * 400))
    placing = asyncio.create_task(
        runtime.intake.place(tools.request("y" * 400, request_id="slow", asked_class="low", slo_s=60.0))
    )
    await tools.settle()
    await clock.advance(0.01)
    higher = asyncio.create_task(runtime.intake.place(tools.request("z" * 400, asked_class="high", slo_s=60.0)))
    await tools.settle()
    first.sent()
    first.finish(Outcome.COMPLETED)
    await tools.settle()
    assert higher.done() and not placing.done()
    yield runtime, higher
    (await higher).finish(Outcome.COMPLETED)
    (await placing).finish(Outcome.COMPLETED)


async def test_a_request_that_is_held_still_is_explained(slow: Any, client_of: Any) -> None:
    runtime, _ = slow

    (wait,) = (await client_of(runtime).get("/admin/explain/slow")).json()["waits"]

    assert (wait["instance_id"], wait["end"]) == ("a", "not logged")
    assert wait["ahead"] == [{"priority_class": "high", "tenant": "", "requests": 1, "came_later": 1}]


async def test_a_store_that_is_away_leaves_the_rest_of_the_explanation(
    slow: Any, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _ = slow
    pool = runtime.pools.pools["default"]

    async def away(*_: Any) -> Any:
        raise StoreUnavailableError("cannot connect to the store")

    monkeypatch.setattr(pool.store.queues, "waits", away)
    explained = (await client_of(runtime).get("/admin/explain/slow")).json()

    assert explained["waits_unknown"] == "the logs of queues cannot be read: cannot connect to the store"
    assert (explained["waits"], explained["request_id"]) == ([], "slow")


async def test_a_request_that_was_not_held_has_no_waits(slow: Any) -> None:
    runtime, higher = slow
    explanation = (await higher).explain()

    assert await waits_of(replace(explanation, rounds=()), runtime.pools.pools["default"]) == {"waits": []}


async def test_a_grant_is_found_of_a_request_whose_reservation_was_answered_late() -> None:
    """The store reserved at 1000 ms, its reply took 500 ms, the grant came at 1600 ms and the answer at 1700 ms."""
    steps = (QueueStep(StepKind.GRANTED, "slow", 1600, 1000),)

    async def waits(request_id: str, instance_id: str, *figures: int) -> list[Wait]:
        slo_ms, enqueued_ms, since_ms, until_ms = figures
        return [wait_in_queue(instance_id, request_id, slo_ms, enqueued_ms, since_ms, steps, until_ms)]

    pool: Any = SimpleNamespace(
        store=SimpleNamespace(queues=SimpleNamespace(waits=waits)), scheduling=SimpleNamespace(classes=CLASSES)
    )
    held = PlacementRound(("a",), {}, Decision("a", 0, 100, 1.0, Reason.ONLY_ONE), 1, PlaceStatus.HELD, (1000, 1000))
    explanation = replace(EXPLAINED, rounds=(held,), course=Course(0.0, 5.0, placed_s=0.5, done_s=0.7))

    (wait,) = (await waits_of(explanation, pool))["waits"]

    assert wait["end"] == "granted"
