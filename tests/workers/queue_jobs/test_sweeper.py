"""The leader plans the queues that no replica planned: a planner that dies costs the time to the next sweep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.queue_jobs import Sweeper
from tests.statestore.samples import first_token
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(queue_order="deadline", max_deferred_s=10.0)


@pytest.fixture
def sweeper(leading: LeaderContext, scheduling: SchedulingSettings) -> Sweeper:
    return Sweeper(leading, scheduling)


StateOf = Callable[[str], Awaitable[RequestState]]


@pytest.fixture
def state_of(pool: PoolStore) -> StateOf:
    async def read(request_id: str) -> RequestState:
        return (await pool.records([request_id]))[request_id].state

    return read


async def told(pool: Any, replica_id: str, act: Any) -> list[Any]:
    """The grants of a replica while ``act`` runs."""
    grants: list[Any] = []
    pool.on_grant(replica_id, grants.append)
    await act()
    return grants


async def test_a_grant_that_a_dead_planner_owed_is_made_by_the_sweep(
    pool: PoolStore,
    sweeper: Sweeper,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
    value: Callable[..., float],
) -> None:
    # given a replica that was told of the room it made, and died before it planned
    await add_instance("a", dispatch_window_tokens=1000, prefill_tokens_per_s=300.0)
    await reserve("first", "a")
    await reserve("held", "a", replica_id="router-2")
    owed = await first_token(pool, "first", "a")
    assert owed.queue is not None and await state_of("held") is RequestState.HELD

    grants = await told(pool, "router-2", sweeper.tick)

    assert await state_of("held") is RequestState.DISPATCHED
    assert [(grant.request_id, grant.instance_id, grant.uncached_tokens) for grant in grants] == [("held", "a", 1000)]
    assert value("dualmap_worker_swept_granted_total") == 1


async def test_a_queue_without_room_is_left_alone(
    pool: PoolStore,
    sweeper: Sweeper,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
    value: Callable[..., float],
) -> None:
    await add_instance("a", dispatch_window_tokens=1000, prefill_tokens_per_s=300.0)
    await reserve("first", "a")
    await reserve("held", "a")

    await sweeper.tick()

    assert await state_of("held") is RequestState.HELD
    assert value("dualmap_worker_swept_granted_total") == 0


async def test_requests_whose_deadlines_passed_are_deferred_though_nothing_happens_on_their_instance(
    pool: PoolStore, sweeper: Sweeper, add_instance: AddInstance, reserve: Reserve, clock: ManualClock
) -> None:
    await add_instance("a", dispatch_window_tokens=1, prefill_tokens_per_s=1000.0)
    await reserve("running", "a", 1000)
    await reserve("held", "a", 1000)
    clock.jump(6.0)

    await sweeper.tick()

    held = (await pool.records(["held"]))["held"]
    assert (held.state, held.deferred) == (RequestState.HELD, True)
    assert (await pool.loads())["a"].deferred_tokens == 1000


async def test_a_deferred_request_goes_when_the_engine_has_nothing_else(
    pool: PoolStore,
    sweeper: Sweeper,
    add_instance: AddInstance,
    reserve: Reserve,
    clock: ManualClock,
    state_of: StateOf,
) -> None:
    await add_instance("a", dispatch_window_tokens=1000, prefill_tokens_per_s=1000.0)
    await reserve("first", "a", 1000)
    await reserve("late", "a", 1000)
    clock.jump(6.0)
    await sweeper.tick()
    await first_token(pool, "first", "a")
    await sweeper.tick()

    assert await state_of("late") is RequestState.DISPATCHED


async def test_a_race_with_a_replica_that_plans_as_well_grants_each_request_once(
    pool: PoolStore,
    sweeper: Sweeper,
    add_instance: AddInstance,
    reserve: Reserve,
    state_of: StateOf,
) -> None:
    # given a replica that commits its plan between the leader's look and the leader's commit
    await add_instance("a", dispatch_window_tokens=1000, prefill_tokens_per_s=300.0)
    await reserve("first", "a", 1000)
    for number in range(3):
        await reserve(f"held-{number}", "a", 600)
    await first_token(pool, "first", "a")
    commit = pool.commit
    raced: list[Any] = []

    async def overtaken(plan: Any, *, replica_id: str = "") -> Any:
        if not raced:
            raced.append(await commit(plan))
        return await commit(plan, replica_id=replica_id)

    pool.commit = overtaken
    grants = await told(pool, "router-1", sweeper.tick)

    assert [grant.request_id for grant in grants] == ["held-0", "held-1"]
    assert (await pool.loads())["a"].dispatched_tokens == 1200
