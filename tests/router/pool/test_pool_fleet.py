"""A pool as a replica's searches and plans see it: plans of queues that it made room in, and what replies told last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.errors import QueueFullError, SloUnreachableError
from dualmap.router.pool.pool_fleet import PoolFleet
from dualmap.router.pool.view import ViewKeeper
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.leader_jobs import sweep_queue
from dualmap.scheduling.request.breaker import BreakerRule
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.request import RequestState
from dualmap.scheduling.steps import drive
from tests.router import tools
from tests.statestore.samples import first_token

LONG = "word " * 1000
"""1250 tokens: more than the dispatch window, 1.25 s of prefill."""
CHAIN = Chain((1, 2), 16, 40)
DEADLINES = SchedulingSettings(policy="dualmap", queue_order="deadline", block_tokens=16, max_deferred_s=0.0)


async def held_request(runtime: Runtime, **fields: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(runtime.intake.place(tools.request(LONG, **fields)))
    await tools.settle()
    assert not task.done()
    return task


async def busy_instance(runtime: Runtime) -> list[Any]:
    """Two requests fill the instance; with the first token of one there is room, though not for late work."""
    return [await runtime.intake.place(tools.request(f"{number} " + "word " * 500)) for number in range(2)]


async def state_of(store: Any, request_id: str) -> RequestState:
    state: RequestState = (await store.pool("default").records([request_id]))[request_id].state
    return state


# what replies show of the members -------------------------------------------------------------------------------


async def test_a_reply_of_another_epoch_has_the_view_read_again(start_runtime: Any, store: Any) -> None:
    pool = (await start_runtime(instances=(tools.spec("a"),))).pools.pools["default"]
    await store.pool("default").members.put_instance(tools.spec("b"))
    assert pool.view.view.ready == ("a",)

    await pool.store.observe(["a"], CHAIN)
    await tools.settle()

    assert pool.view.view.ready == ("a", "b")


async def test_a_store_that_starts_counting_again_is_followed(store: Any, clock: Any, scheduling: Any) -> None:
    for name in "abc":
        await store.pool("default").members.put_instance(tools.spec(name))
    keeper = ViewKeeper(store.pool("default"), clock=clock)
    running = asyncio.create_task(keeper.run())
    await tools.settle()
    emptied = keeper._pool = type(store)(scheduling, now_ms=clock.now_ms).pool("default")
    await emptied.members.put_instance(tools.spec("d"))
    assert (await emptied.membership()).epoch < keeper.view.epoch

    fleet = PoolFleet(keeper, CircuitBreakers(BreakerRule()), clock.monotonic_s)
    fleet.note(await emptied.observe(["d"], CHAIN))
    await tools.settle()

    assert keeper.view.ready == ("d",)
    running.cancel()


# who plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("makes_room", ["first_token", "finish", "reroute"])
async def test_the_replica_that_makes_room_grants_whatever_replica_a_held_request_is_of(
    start_runtime: Any, store: Any, makes_room: str
) -> None:
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime()
    filling = await one.intake.place(tools.request(f"1 {LONG}"))
    held = await held_request(other)

    if makes_room == "first_token":
        filling.first_token()
    elif makes_room == "finish":
        filling.finish(Outcome.CLIENT_GONE)
    else:
        with pytest.raises(Exception, match="no other instance is ready"):
            await filling.failed(Failed(InstanceFailure(FailureKind.CONNECT)))

    granted = await asyncio.wait_for(held, 60)
    assert granted.machine.instance_id == "a"
    for request in (filling, granted):
        request.finish(Outcome.COMPLETED)


async def test_grants_of_its_own_requests_need_no_message(
    start_runtime: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    filling = await runtime.intake.place(tools.request(f"1 {LONG}"))
    held = await held_request(runtime)
    monkeypatch.setattr(store.server, "deliver", lambda: None)  # every message is lost

    filling.first_token()
    await tools.settle()

    assert held.done()
    for request in (filling, await held):
        request.finish(Outcome.COMPLETED)


async def test_a_request_that_is_held_where_there_is_room_is_planned_by_its_own_replica(
    start_runtime: Any, store: Any
) -> None:
    """Nothing will happen on the instance, so no other caller would be told."""
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    pool = store.pool("default")
    await pool.place(tools.placement("first", tokens=1200))
    await pool.place(tools.placement("left behind", tokens=100))  # held; its replica died before it planned
    await first_token(pool, "first", "a")
    assert await state_of(store, "left behind") is RequestState.HELD

    request = await asyncio.wait_for(runtime.intake.place(tools.request("x" * 400)), 60)

    assert await state_of(store, "left behind") is RequestState.DISPATCHED
    assert "commit" in tampered.calls
    request.finish(Outcome.COMPLETED)


async def test_a_planner_that_dies_costs_nothing_as_the_leaders_sweep_plans_that_queue(
    start_runtime: Any, store: Any, scheduling: Any
) -> None:
    tampered = tools.Tampered(store)
    dying = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    other = await start_runtime()
    filling = await dying.intake.place(tools.request(f"1 {LONG}"))
    held = await held_request(other)

    async def dies(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    tampered.before["commit"] = dies
    filling.first_token()
    await tools.settle()
    assert not held.done()

    swept = await drive(sweep_queue("a", queue_order_of(scheduling)), store.pool("default"))

    assert swept == 1
    granted = await asyncio.wait_for(held, 60)
    for request in (filling, granted):
        request.finish(Outcome.COMPLETED)


async def test_a_plan_that_another_planner_overtook_is_made_again_on_the_queue_as_it_is_then(
    start_runtime: Any, store: Any
) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    filling = await runtime.intake.place(tools.request(f"1 {LONG}"))
    gone, held = await held_request(runtime), await held_request(runtime)
    raced: list[Any] = []

    async def overtaken(plan: Any, **_: Any) -> None:
        if not raced:
            raced.append(plan)
            gone.cancel()
            await tools.settle()

    tampered.before["commit"] = overtaken
    filling.first_token()
    granted = await asyncio.wait_for(held, 60)

    assert granted.machine.instance_id == "a"
    assert tampered.calls.count("commit") >= 2
    for request in (filling, granted):
        request.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await store.pool("default").snapshot()).requests == ()


# refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", [DEADLINES])
async def test_a_request_is_refused_once_it_was_deferred_for_too_long(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    filling = await busy_instance(runtime)
    held = await held_request(runtime, slo_s=2.0)
    clock.now_s += 2.0

    filling[0].first_token()
    await tools.settle()
    assert not held.done()
    await clock.advance(1.1)

    with pytest.raises(QueueFullError, match="max_deferred_s"):
        await asyncio.wait_for(held, 60)
    await tools.settle()
    assert len((await store.pool("default").snapshot()).requests) == 2
    for request in filling:
        request.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await store.pool("default").snapshot()).requests == ()


@pytest.mark.parametrize("scheduling", [DEADLINES.model_copy(update={"max_deferred_s": 30.0})])
async def test_a_deferred_request_is_served_when_the_engine_has_nothing_else_or_refused_where_late_ones_are(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    serving = await start_runtime(instances=(tools.spec("a", max_queued_requests=10),))
    refusing = await start_runtime(late_requests="refuse")
    filling = await serving.intake.place(tools.request(f"1 {LONG}"))
    late = await held_request(serving, slo_s=0.3)
    refused = await held_request(refusing, slo_s=6.0)
    clock.now_s += 6.0

    filling.first_token()
    await clock.advance(1.1)

    with pytest.raises(SloUnreachableError):
        await asyncio.wait_for(refused, 60)
    served = await asyncio.wait_for(late, 60)
    assert served.machine.instance_id == "a"
    for request in (filling, served):
        request.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await store.pool("default").snapshot()).requests == ()


# what replies told -----------------------------------------------------------------------------------------------


async def test_waits_and_rates_come_from_the_load_last_told(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", prefill_tokens_per_s=500.0),))
    fleet = runtime.pools.pools["default"].fleet
    spec = fleet.sight.view.instances["a"]
    assert fleet.window_delay_s(spec, 1000) == 4.0, "by the prior, before anything was told"
    requests = [await runtime.intake.place(tools.request("x" * 2000)) for _ in range(2)]

    # 500 tokens of the first were pending when the second was placed
    assert fleet.expected_wait_s("a") == 1.0
    assert fleet.window_delay_s(tools.spec("a", prefill_tokens_per_s=100.0), 1000) == 4.0, "by the told rate"
    assert fleet.expected_wait_s("unknown") == 1.0
    assert fleet.rates() == {"a": 500.0}
    for request in requests:
        request.finish(Outcome.COMPLETED)


async def test_what_left_the_fleet_is_forgotten(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", prefill_tokens_per_s=500.0),))
    pool = runtime.pools.pools["default"]
    for _ in range(2):
        request = await runtime.intake.place(tools.request("x" * 2000))
        request.finish(Outcome.COMPLETED)
    await tools.settle()
    await store.pool("default").members.remove_instance("a")
    await pool.view.refresh()

    pool.fleet.forget_departed()

    assert pool.fleet.rates() == {}
    slower = tools.spec("a", prefill_tokens_per_s=100.0)
    assert pool.fleet.window_delay_s(slower, 1000) == 20.0


async def test_a_reply_of_another_epoch_brings_the_view_up_to_date(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await store.pool("default").members.put_instance(tools.spec("b"))

    request = await runtime.intake.place(tools.request())
    await tools.settle()

    assert runtime.pools.pools["default"].view.view.ready == ("a", "b")
    request.finish(Outcome.COMPLETED)


async def test_the_ttft_is_learned_from_a_hundred_first_tokens_a_second_at_most(start_runtime: Any, clock: Any) -> None:
    fleet = (await start_runtime(instances=(tools.spec("a"),))).pools.pools["default"].fleet
    taught = 0
    for _ in range(4000):
        taught += fleet.teaches()
        clock.now_s += 0.00025

    assert 98 <= taught <= 101
