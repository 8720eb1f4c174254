"""The store contract: many callers at once. Two replicas are two stores on one server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from statestore.base import MigrateStatus, PoolStore, Store
from statestore.redis import RedisStore
from statestore.reservation import ReserveStatus
from tests.statestore.samples import CHAIN, SCHEDULING, HandClock, instance, reservation
from tests.statestore.test_contract_requests import assert_sums_hold


@pytest.fixture
async def pools(store: Store, clock: HandClock) -> AsyncIterator[tuple[PoolStore, PoolStore]]:
    """The pool as two replicas see it, each over a connection of its own where there are connections."""
    if not isinstance(store, RedisStore):
        yield store.pool("default"), store.pool("default")
        return
    other = RedisStore(store.settings, scheduling=SCHEDULING, test_clock=clock)
    await other.open()
    yield store.pool("default"), other.pool("default")
    await other.close()


async def test_of_a_hundred_at_once_exactly_those_that_fit_are_dispatched(pools: tuple[PoolStore, PoolStore]) -> None:
    await pools[0].put_instance(instance("a", dispatch_window_tokens=4000, max_queued_requests=60))

    outcomes = await asyncio.gather(
        *(
            pools[number % 2].reserve(reservation(f"r{number}", replica_id=("one", "two")[number % 2]))
            for number in range(100)
        )
    )

    assert Counter(outcome.status for outcome in outcomes) == {
        ReserveStatus.DISPATCHED: 8,
        ReserveStatus.HELD: 60,
        ReserveStatus.QUEUE_FULL: 32,
    }
    positions = sorted(outcome.queue_position for outcome in outcomes if outcome.status is ReserveStatus.HELD)
    assert positions == list(range(60))
    await assert_sums_hold(pools[0])


async def test_two_replicas_that_saw_the_same_gap_do_not_both_fill_it(pools: tuple[PoolStore, PoolStore]) -> None:
    await pools[0].put_instance(instance("a"))
    seen = [(await pool.observe(["a"], CHAIN)).loads["a"].pending_tokens for pool in pools]

    outcomes = await asyncio.gather(
        *(
            pool.reserve(reservation(replica, replica_id=replica, seen_pending_tokens=pending, tolerance_tokens=0))
            for pool, replica, pending in zip(pools, ("one", "two"), seen, strict=True)
        )
    )

    assert Counter(outcome.status for outcome in outcomes) == {ReserveStatus.DISPATCHED: 1, ReserveStatus.STALE: 1}


async def test_one_request_reserved_many_times_at_once_counts_once(pools: tuple[PoolStore, PoolStore]) -> None:
    await pools[0].put_instance(instance("a"))

    outcomes = await asyncio.gather(*(pools[number % 2].reserve(reservation("r")) for number in range(40)))

    assert {outcome.status for outcome in outcomes} == {ReserveStatus.DISPATCHED}
    assert (await pools[0].loads())["a"].pending_tokens == 400


async def test_first_tokens_finishes_and_migrations_at_once_leave_nothing_behind(
    pools: tuple[PoolStore, PoolStore],
) -> None:
    for instance_id in ("a", "b"):
        await pools[0].put_instance(instance(instance_id, max_queued_requests=100))
    lease = await pools[0].acquire_lease("worker", 60_000)
    assert lease is not None
    names = [f"r{number}" for number in range(60)]
    for name in names:
        await pools[0].reserve(reservation(name, "a", alternative_id="b", alternative_uncached_tokens=100))

    async def live(name: str, pool: PoolStore) -> int:
        await asyncio.gather(
            pool.first_token(name, "a", CHAIN),
            pools[1].migrate(name, "a", "b", reason="benefit", fence=lease.fence),
        )
        await pool.first_token(name, "b", CHAIN)
        return sum(await asyncio.gather(pool.finish(name), pools[1].finish(name)))

    finished = await asyncio.gather(*(live(name, pools[number % 2]) for number, name in enumerate(names)))

    assert finished == [1] * len(names)
    view = await pools[0].snapshot()
    assert view.requests == ()
    for load in view.loads.values():
        figures = (load.pending_tokens, load.dispatched_tokens, load.context_tokens)
        assert (*figures, load.queued_requests, load.running_requests) == (0, 0, 0, 0, 0)


async def test_a_request_that_two_leaders_would_move_moves_once(pools: tuple[PoolStore, PoolStore]) -> None:
    for instance_id in ("a", "b", "c"):
        await pools[0].put_instance(instance(instance_id, dispatch_window_tokens=1))
        await pools[0].reserve(reservation(f"first-on-{instance_id}", instance_id))
    await pools[0].reserve(reservation("r", "a"))
    lease = await pools[0].acquire_lease("worker", 60_000)
    assert lease is not None

    statuses = await asyncio.gather(
        *(
            pools[number % 2].migrate("r", "a", "bc"[number % 2], reason="benefit", fence=lease.fence)
            for number in range(10)
        )
    )

    assert Counter(statuses) == {MigrateStatus.MIGRATED: 1, MigrateStatus.NOT_HELD: 9}
    await assert_sums_hold(pools[0])


async def test_of_many_workers_one_leads(pools: tuple[PoolStore, PoolStore]) -> None:
    leases = await asyncio.gather(*(pools[number % 2].acquire_lease(f"worker-{number}", 1000) for number in range(20)))

    assert len([lease for lease in leases if lease is not None]) == 1
