"""Held: a request waits in the fleet, and may be moved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.errors import (
    HoldTimeoutError,
)
from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.request import RequestState
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, full_fleet, live, nothing_is_left
from tests.statestore.samples import finish


async def test_a_held_request_goes_when_room_appears(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()
    assert not waiting.done()

    for request in requests:
        request.first_token()
    await tools.settle()

    granted = await waiting
    assert (await live(store))[granted.request_id] is RequestState.DISPATCHED
    for request in (*requests, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_goes_where_it_was_migrated_to(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="moved")))
    await tools.settle()
    record = (await store.pool("default").records(["moved"]))["moved"]
    lease = await store.pool("default").leader_lease.acquire("leader", 60_000)

    await store.pool("default").queues.migrate(record, record.alternative_id, reason="test", fence=lease.fence)
    next(request for request in requests if request.machine.instance_id == record.alternative_id).first_token()

    granted = await asyncio.wait_for(waiting, 60)
    assert granted.machine.instance_id == record.alternative_id
    for request in (*requests, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_grant_that_overtakes_its_reservations_answer_is_kept(start_runtime: Any, store: Any) -> None:
    tampered: list[Any] = []

    def through(real: Any) -> Any:
        tampered.append(tools.Tampered(real))
        return tampered[0]

    runtime = await start_runtime(instances=(tools.spec("a"),), through=through)
    pool = runtime.pools.pools["default"]

    async def held_but_granted(placement: Any) -> PlaceReply:
        reply = await store.pool("default").place(placement)
        pool.grant_waiters.deliver(Grant(placement.request.request_id, "a", "replica-1", 1, 100))
        await tools.settle()
        return replace(reply, status=PlaceStatus.HELD)

    tampered[0].before["place"] = held_but_granted

    request = await asyncio.wait_for(runtime.intake.place(tools.request()), 60)

    assert request.machine.instance_id == "a"
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_grant_that_was_missed_is_found_by_looking(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    pool = runtime.pools.pools["default"]
    pool.grant_waiters.deliver = lambda grant: None  # the stream tells nothing
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()
    for request in requests:
        request.first_token()
    await tools.settle()
    assert not waiting.done()

    await clock.advance(1.1)

    granted = await asyncio.wait_for(waiting, 60)
    for request in (*requests, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_that_is_cut_off_counts_as_that(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    held = asyncio.create_task(runtime.intake.place(tools.request()))
    await tools.settle()

    held.cancel(Outcome.CUT_OFF)
    with pytest.raises(asyncio.CancelledError):
        await held

    cut_off = {"pool": "default", "outcome": "cut_off"}
    assert runtime.context.metrics.registry.get_sample_value("dualmap_requests_total", cut_off) == 1
    for request in requests:
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_request_is_not_held_past_the_longest_hold(
    start_runtime: Any, store: Any, clock: Any, scheduling: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request(LONG))
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()

    await clock.advance(scheduling.max_hold_s - 0.1)
    assert not waiting.done()
    await clock.advance(0.2)

    with pytest.raises(HoldTimeoutError) as refused:
        await waiting
    assert refused.value.retry_after_s == pytest.approx(1.25)
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_that_the_store_forgot_is_placed_again(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="forgotten")))
    await tools.settle()
    await finish(store.pool("default"), "forgotten")
    for request in requests:
        request.finish(Outcome.COMPLETED)
    await tools.settle()

    await clock.advance(1.1)

    placed = await asyncio.wait_for(waiting, 60)
    assert (await live(store)) == {"forgotten": RequestState.DISPATCHED}
    placed.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_that_the_store_knows_after_all_is_placed_again_under_its_own_id(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    """A look-up that found nothing was wrong: an older copy of the store answered it."""
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    filling = await runtime.intake.place(tools.request(f"1 {LONG}"))
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="mine")))
    await tools.settle()

    async def nothing(*_: Any) -> dict[str, Any]:
        tampered.before.clear()
        return {"another": None}

    tampered.before["records"] = nothing
    await clock.advance(1.1)

    assert set(await live(store)) == {filling.request_id, "mine"}
    assert (await store.pool("default").records(["mine"]))["mine"].attempt == 2
    filling.finish(Outcome.COMPLETED)
    (await asyncio.wait_for(waiting, 60)).finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)
