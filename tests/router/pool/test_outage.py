"""A replica with held requests whose store goes away and comes back: it decides alone, and hands over what it did."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.live_request import LiveRequest
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from tests.router import tools

LONG = "word " * 1000
"""1250 tokens: one such prompt fills an instance."""
SHARED = (
    "place", "observe", "commit", "release", "records", "membership", "heartbeat",
    "requests_of", "adopt", "snapshot",
)  # fmt: skip


class Outage:
    """A store that goes away and comes back as it was."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = tools.Tampered(store)

    def begin(self) -> None:
        async def away(*_: Any, **__: Any) -> None:
            raise StoreUnavailableError("away")

        self.store.before |= dict.fromkeys(SHARED, away)

    def end(self) -> None:
        self.store.before.clear()


@pytest.fixture
async def outage(store: MemoryStore) -> Any:
    made = Outage(store)
    yield made
    made.end()


async def states(store: MemoryStore) -> dict[str, RequestState]:
    return {request.request_id: request.state for request in (await store.pool("default").snapshot()).requests}


async def held_request(runtime: Runtime, request_id: str) -> asyncio.Task[Any]:
    task = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id=request_id)))
    await tools.settle()
    assert not task.done()
    return task


@dataclass(frozen=True)
class Queue:
    """A replica whose one instance is filled by a request, with another one held."""

    runtime: Runtime
    filling: LiveRequest
    held: asyncio.Task[Any]


@pytest.fixture
async def queue(start_runtime: Any, outage: Outage) -> Queue:
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: outage.store)
    filling = await runtime.intake.place(tools.request(f"1 {LONG}", request_id="filling"))
    return Queue(runtime, filling, await held_request(runtime, "held"))


async def test_a_request_held_before_the_outage_is_granted_in_it_and_handed_over_as_it_is(
    store: Any, clock: Any, outage: Outage, queue: Queue
) -> None:
    filling, held = queue.filling, queue.held

    outage.begin()
    filling.first_token()
    await clock.advance(0.2)
    granted = await asyncio.wait_for(held, 60)
    assert await states(store) == {"filling": RequestState.DISPATCHED, "held": RequestState.HELD}, (
        "it knows nothing yet"
    )
    outage.end()
    await clock.advance(3.0)

    assert not queue.runtime.pools.pools["default"].store.degraded
    assert await states(store) == {"filling": RequestState.PREFILLED, "held": RequestState.DISPATCHED}
    load = (await store.pool("default").loads())["a"]
    assert (load.pending_tokens, load.dispatched_tokens, load.queued_requests) == (1250, 1250, 0)
    for request in (filling, granted):
        request.finish(Outcome.COMPLETED)
    await tools.settle()
    assert await states(store) == {}


async def test_a_request_that_is_held_throughout_the_outage_keeps_its_place(
    store: Any, clock: Any, outage: Outage, queue: Queue
) -> None:
    filling, held = queue.filling, queue.held
    first = (await store.pool("default").records(["held"]))["held"]
    await clock.advance(0.5)

    outage.begin()
    later = await held_request(queue.runtime, "later")
    await clock.advance(0.5)
    outage.end()
    await clock.advance(3.0)

    records = await store.pool("default").records(["held", "later"])
    assert (records["held"].state, records["held"].enqueued_ms) == (RequestState.HELD, first.enqueued_ms)
    assert records["later"].enqueued_ms - first.enqueued_ms == pytest.approx(500, abs=20)
    filling.finish(Outcome.COMPLETED)
    granted = await asyncio.wait_for(held, 60)
    assert not later.done()
    granted.finish(Outcome.COMPLETED)
    (await asyncio.wait_for(later, 60)).finish(Outcome.COMPLETED)
    await tools.settle()
    assert await states(store) == {}


async def test_a_client_that_leaves_a_queue_during_the_outage_is_gone_from_the_store_after_it(
    store: Any, clock: Any, outage: Outage, queue: Queue
) -> None:
    filling, held = queue.filling, queue.held

    outage.begin()
    held.cancel()
    await clock.advance(1.0)
    outage.end()
    await clock.advance(3.0)

    assert await states(store) == {"filling": RequestState.DISPATCHED}
    assert (await store.pool("default").loads())["a"].pending_tokens == 1250
    filling.finish(Outcome.COMPLETED)


async def test_requests_of_other_replicas_are_left_alone_by_a_hand_over(
    start_runtime: Any, store: Any, clock: Any, outage: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: outage.store)
    await store.pool("default").heartbeat("another", 60_000, {})
    await store.pool("default").place(tools.placement("theirs", tokens=1200, replica_id="another"))
    held = await held_request(runtime, "held")

    outage.begin()
    await clock.advance(2.0)
    granted = await asyncio.wait_for(held, 60)  # alone, it has the instance for itself
    outage.end()
    await clock.advance(3.0)

    assert await states(store) == {"theirs": RequestState.DISPATCHED, "held": RequestState.DISPATCHED}
    assert (await store.pool("default").loads())["a"].pending_tokens == 1200 + 1250
    granted.finish(Outcome.COMPLETED)
    await tools.settle()
    assert await states(store) == {"theirs": RequestState.DISPATCHED}
