"""Dead replicas' requests end; living replicas get the chance to say that they live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.errors import LeaseLostError, StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.queue_jobs import Sweeper
from dualmap.workers.upkeep_jobs import Reaper
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve
from tests.workers.flaky_pool import FlakyPool

ReaperOf = Callable[..., Reaper]


@pytest.fixture
def reaper_of(leading: LeaderContext) -> ReaperOf:
    def make(pool: Any, grace_s: float = 0.0) -> Reaper:
        return Reaper(replace(leading, pool=pool), grace_s=grace_s)

    return make


async def test_a_dead_replicas_leftovers_vanish_and_its_neighbours_stay(
    clock: ManualClock,
    pool: PoolStore,
    reaper_of: ReaperOf,
    add_instance: AddInstance,
    reserve: Reserve,
    value: Callable[..., float],
    leading: LeaderContext,
    scheduling: SchedulingSettings,
) -> None:
    # given two replicas with requests on one instance, held and dispatched, and one of them dies
    await add_instance("a", dispatch_window_tokens=1500)
    await pool.heartbeat("dead", 1000, {})
    await pool.heartbeat("alive", 60_000, {})
    for number in range(4):
        await reserve(f"dead-{number}", "a", replica_id="dead")
    await reserve("alive-0", "a", replica_id="alive")
    clock.jump(2.0)

    await reaper_of(pool).tick()

    load = (await pool.loads())["a"]
    assert (load.pending_tokens, load.queued_requests, load.running_requests) == (1000, 1, 0)
    await Sweeper(leading, scheduling).tick()
    load = (await pool.loads())["a"]
    assert (load.pending_tokens, load.queued_requests, load.running_requests) == (1000, 0, 1)
    assert [info.replica_id for info in (await pool.snapshot()).replicas] == ["alive"]
    assert value("dualmap_worker_reaped_requests_total") == 4
    assert value("dualmap_worker_reaped_replicas_total") == 1


async def test_a_replica_that_retired_is_cleared_away_without_alarm(
    pool: PoolStore,
    reaper_of: ReaperOf,
    add_instance: AddInstance,
    reserve: Reserve,
    value: Callable[..., float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await add_instance("a")
    await pool.heartbeat("router-1", 60_000, {})
    await reserve("r1", "a", replica_id="router-1")
    await pool.retire("router-1")

    await reaper_of(pool).tick()

    assert not await pool.records(["r1"]) and not await pool.upkeep.expired_replicas()
    assert value("dualmap_worker_reaped_requests_total") == 1
    assert value("dualmap_worker_reaped_replicas_total") == 0
    assert "replica reaped" not in caplog.text


async def test_after_taking_over_nobody_is_reaped_before_the_grace_is_over(
    clock: ManualClock, pool: PoolStore, reaper_of: ReaperOf, add_instance: AddInstance, reserve: Reserve
) -> None:
    await add_instance("a")
    await pool.heartbeat("router-1", 1000, {})
    await reserve("r1", "a", replica_id="router-1")
    clock.jump(5.0)
    reaper = reaper_of(pool, grace_s=2.0)

    await reaper.tick()
    assert await pool.records(["r1"])

    clock.jump(2.0)
    await reaper.tick()
    assert not await pool.records(["r1"])


async def test_a_store_outage_starts_the_grace_again(
    clock: ManualClock,
    flaky: FlakyPool,
    pool: PoolStore,
    reaper_of: ReaperOf,
    add_instance: AddInstance,
    reserve: Reserve,
) -> None:
    # given a replica that beats every second, and an outage in which it could not
    await add_instance("a")
    await pool.heartbeat("router-1", 1000, {})
    await reserve("r1", "a", replica_id="router-1")
    reaper = reaper_of(flaky, grace_s=2.0)
    clock.jump(2.0)
    flaky.away = True
    with pytest.raises(StoreUnavailableError):
        await reaper.tick()

    # when the store is back and the reaper is faster than the replica
    flaky.away = False
    await reaper.tick()
    await pool.heartbeat("router-1", 10_000, {})
    clock.jump(5.0)
    await reaper.tick()

    assert await pool.records(["r1"]), "its request goes on"


async def test_a_deposed_reaper_reaps_nothing(
    clock: ManualClock, pool: PoolStore, reaper_of: ReaperOf, add_instance: AddInstance, reserve: Reserve
) -> None:
    await add_instance("a")
    await pool.heartbeat("dead", 1000, {})
    await reserve("r1", "a", replica_id="dead")
    reaper = reaper_of(pool)
    clock.jump(20_000.0)  # its lease runs out as well

    with pytest.raises(LeaseLostError):
        await reaper.tick()

    assert await pool.records(["r1"])
