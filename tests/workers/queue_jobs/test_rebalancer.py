"""Held requests leave an overloaded instance: on trigger, by sweep, within their pair, and only then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.queue_jobs import Rebalancer, RebalanceRound, next_round
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve
from tests.workers.flaky_pool import FlakyPool

RebalancerOf = Callable[..., Rebalancer]


@pytest.fixture
def rebalancer_of(leading: LeaderContext, scheduling: SchedulingSettings) -> RebalancerOf:
    def make(pool: Any, **changes: Any) -> Rebalancer:
        return Rebalancer(replace(leading, pool=pool, reader=pool), scheduling, **changes)

    return make


@pytest.fixture
async def hotspot(add_instance: AddInstance, reserve: Reserve) -> None:
    """Instance a with 8 s of work, most of it held; b and c idle; every request's other candidate is b."""
    for instance_id in "abc":
        await add_instance(instance_id, prefill_tokens_per_s=1000.0, dispatch_window_tokens=2000)
    for number in range(8):
        await reserve(f"r{number}", "a", 1000, other="b")


async def test_a_sweep_moves_requests_until_the_rest_is_on_time(
    pool: PoolStore, rebalancer_of: RebalancerOf, hotspot: Any, value: Callable[..., float]
) -> None:
    await rebalancer_of(pool).tick()

    loads = await pool.loads()
    assert loads["a"].pending_tokens <= 5000, "what is left meets its SLO of 5 s"
    assert 0 < loads["b"].pending_tokens <= 5000, "and no request was moved into lateness"
    assert loads["c"].pending_tokens == 0, "never outside the pair"
    moved = value("dualmap_worker_migrations_total", reason="rebalance", status="migrated")
    assert moved * 1000 == loads["b"].pending_tokens
    assert (await pool.snapshot()).migrations == {"rebalance": moved}


async def test_a_second_round_finds_nothing_to_do(pool: PoolStore, rebalancer_of: RebalancerOf, hotspot: Any) -> None:
    await rebalancer_of(pool).tick()
    before = await pool.loads()

    await rebalancer_of(pool).tick()

    assert await pool.loads() == before


async def test_between_sweeps_a_trigger_is_answered_at_once(
    pool: PoolStore,
    rebalancer_of: RebalancerOf,
    clock: ManualClock,
    add_instance: AddInstance,
    reserve: Reserve,
    value: Callable[..., float],
) -> None:
    # given a sweep that is long from being due again
    for instance_id in "ab":
        await add_instance(instance_id, prefill_tokens_per_s=1000.0, dispatch_window_tokens=2000)
    rebalancer = rebalancer_of(pool, sweep_interval_s=30.0)
    await rebalancer.tick()

    # when the routing path finds both candidates overloaded
    for number in range(16):
        await reserve(f"r{number}", "a", 1000, other="b", overloaded=number == 15)
    await rebalancer.tick()

    assert (await pool.loads())["b"].pending_tokens > 0
    assert value("dualmap_worker_rebalances_total", cause="triggered") == 2


async def test_nobody_moves_while_everybody_is_on_time(
    pool: PoolStore, rebalancer_of: RebalancerOf, add_instance: AddInstance, reserve: Reserve
) -> None:
    for instance_id in "ab":
        await add_instance(instance_id, prefill_tokens_per_s=1000.0, dispatch_window_tokens=1000)
    for number in range(4):
        await reserve(f"r{number}", "a", 1000, other="b")

    await rebalancer_of(pool).tick()

    assert (await pool.loads())["b"].pending_tokens == 0


async def test_an_instance_that_stopped_finishing_prefills_loses_its_queue(
    pool: PoolStore,
    rebalancer_of: RebalancerOf,
    add_instance: AddInstance,
    reserve: Reserve,
    clock: ManualClock,
) -> None:
    # given 3 s of work on a, which would be on time, and an engine that decodes and prefills nothing
    for instance_id in "ab":
        await add_instance(instance_id, prefill_tokens_per_s=1000.0, dispatch_window_tokens=1000)
    for number in range(3):
        await reserve(f"r{number}", "a", 1000, other="b", slo_ms=9000)
    await rebalancer_of(pool).tick()
    assert (await pool.loads())["b"].pending_tokens == 0

    clock.jump(4.0)  # past T: 4 s waited + 4 s stalled + 2 s of work before the second one
    await rebalancer_of(pool).tick()

    assert (await pool.loads())["b"].pending_tokens > 0


async def test_one_round_moves_no_more_than_its_bound(
    pool: PoolStore, rebalancer_of: RebalancerOf, hotspot: Any
) -> None:
    await rebalancer_of(pool, max_moves=2).tick()

    assert (await pool.loads())["b"].pending_tokens == 2000


async def test_a_deposed_rebalancer_moves_nothing(pool: PoolStore, rebalancer_of: RebalancerOf, hotspot: Any) -> None:
    rebalancer = rebalancer_of(pool)
    await pool.leader_lease.release((await pool.snapshot()).leader)
    assert await pool.leader_lease.acquire("another", 1000) is not None

    with pytest.raises(LeaseLostError):
        await rebalancer.tick()

    assert (await pool.loads())["a"].pending_tokens == 8000


def test_a_round_waits_for_triggers_no_longer_than_to_the_next_sweep() -> None:
    assert next_round(10.0, next_sweep_s=10.0) == RebalanceRound(sweep=True, wait_s=0.0)
    assert next_round(9.5, next_sweep_s=10.0) == RebalanceRound(sweep=False, wait_s=0.5)
    assert next_round(9.5, next_sweep_s=99.0) == RebalanceRound(sweep=False, wait_s=1.0)


async def test_triggers_where_nothing_can_move_wait_for_the_next_sweep(
    pool: PoolStore,
    flaky: FlakyPool,
    rebalancer_of: RebalancerOf,
    add_instance: AddInstance,
    reserve: Reserve,
    clock: ManualClock,
) -> None:
    # given an instance whose late requests have nowhere to go
    await add_instance("a", prefill_tokens_per_s=1000.0, dispatch_window_tokens=1000)
    rebalancer = rebalancer_of(flaky)
    await rebalancer.tick()

    # when every further request triggers
    for number in range(12):
        await reserve(f"r{number}", "a", 1000, overloaded=True)
        await rebalancer.tick()
    assert flaky.calls.count("queue") == 1

    clock.jump(1.0)
    await rebalancer.tick()
    assert flaky.calls.count("queue") == 2, "the sweep looks"

    await reserve("another", "a", 1000, overloaded=True)
    await rebalancer.tick()
    assert flaky.calls.count("queue") == 3, "and after it the first trigger counts again"


async def test_after_an_expensive_round_the_pause_is_as_long(
    pool: PoolStore, rebalancer_of: RebalancerOf, hotspot: Any, clock: ManualClock
) -> None:
    original = pool.queues.queue

    async def slow_queue(instance_id: str) -> Any:
        clock.jump(0.3)
        return await original(instance_id)

    pool.queues.queue = slow_queue  # type: ignore[assignment]
    rebalancer = rebalancer_of(pool)
    await rebalancer.tick()

    assert rebalancer.interval_s == pytest.approx(0.3)
