"""The store contract: leadership, queues, migration, hotness, repair; on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.hotness import MAX_KEY_BLOCKS, HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import (
    DEADLINE,
    HandClock,
    assert_sums_hold,
    chain,
    drift,
    first_token,
    hold,
    instance,
    lead,
    place,
    sweep,
)


@pytest.fixture
async def lease(pool: PoolStore) -> Lease:
    taken = await pool.leader_lease.acquire("worker-1", 10_000)
    assert taken is not None
    return taken


# leases ------------------------------------------------------------------------------------------------------
async def test_one_leads_until_the_lease_runs_out_and_the_next_has_a_higher_fence(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    refused = await pool.leader_lease.acquire("worker-2", 10_000)
    again = await pool.leader_lease.acquire("worker-1", 10_000)
    clock.advance(10_000)
    next_lease = await pool.leader_lease.acquire("worker-2", 10_000)

    assert refused is None
    assert again == lease
    assert next_lease is not None
    assert next_lease.fence > lease.fence


async def test_a_renewed_lease_lasts_and_a_lost_one_cannot_be_renewed(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    clock.advance(9_000)
    renewed = await pool.leader_lease.renew(lease, 10_000)
    clock.advance(9_000)
    assert await pool.leader_lease.acquire("worker-2", 10_000) is None

    clock.advance(1_000)

    assert renewed.expires_ms == lease.expires_ms + 9_000
    with pytest.raises(LeaseLostError):
        await pool.leader_lease.renew(renewed, 10_000)


async def test_a_lease_ends_when_the_clock_is_set_back_instead_of_when_it_has_caught_up(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    clock.advance(-10_000)
    renewed = await pool.leader_lease.renew(lease, 10_000)
    assert renewed == Lease("worker-1", lease.fence, clock.now_ms + 10_000), "a small step changes no leader"
    clock.advance(-600_000)

    assert (await pool.snapshot()).leader is None
    with pytest.raises(LeaseLostError):
        await pool.leader_lease.renew(lease, 10_000)
    successor = await pool.leader_lease.acquire("worker-2", 10_000)
    assert successor is not None
    assert successor.fence == lease.fence + 1


async def test_a_released_lease_is_free_at_once_and_releasing_again_harms_nobody(pool: PoolStore, lease: Lease) -> None:
    await pool.leader_lease.release(lease)
    successor = await pool.leader_lease.acquire("worker-2", 10_000)

    await pool.leader_lease.release(lease)

    assert successor is not None
    assert (await pool.snapshot()).leader == successor


async def test_a_deposed_leader_changes_nothing(pool: PoolStore, clock: HandClock, lease: Lease) -> None:
    await pool.members.put_instance(instance("a"))
    clock.advance(10_000)
    assert await pool.leader_lease.acquire("worker-2", 10_000) is not None
    before = await pool.snapshot()

    for write in (
        pool.members.set_instance_state("a", InstanceState.DOWN, fence=lease.fence),
        pool.members.update_instance("a", {"max_running_requests": 3}, fence=lease.fence),
        pool.publications.publish_tree(HotnessTree({1: 1}), {1: 9}, fence=lease.fence),
        pool.publications.publish_learned(Learned(), {"a": 5.0}, fence=lease.fence),
        pool.upkeep.reap("one", fence=lease.fence),
        pool.upkeep.repair(fence=lease.fence),
    ):
        with pytest.raises(LeaseLostError):
            await write

    assert await pool.snapshot() == before


# wishes for a rebalance ---------------------------------------------------------------------------------------
async def test_waiting_for_a_wish_ends_when_one_comes(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    waiting = asyncio.create_task(_result(pool.queues.wanted_rebalances(30)))
    await asyncio.sleep(0.05)

    await place(pool, "r", slo_ms=1, rebalances=True)

    assert list(await asyncio.wait_for(waiting, 5)) == ["a"]


async def test_waiting_for_a_wish_can_be_given_up_without_losing_the_next(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    waiting = asyncio.create_task(_result(pool.queues.wanted_rebalances(30)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.05)

    await place(pool, "r", slo_ms=1, rebalances=True)

    assert list(await pool.queues.wanted_rebalances(5)) == ["a"]


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


# hotness -----------------------------------------------------------------------------------------------------
async def test_arrivals_are_read_on_from_the_last_one_seen_and_count_a_retry_once(
    pool: PoolStore, clock: HandClock
) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=10_000))
    for number in range(3):
        await place(pool, f"r{number}", chain=chain(number + 1, number + 11))
        clock.advance(10)
    await place(pool, "r0", attempt=2)

    first = await pool.publications.arrivals("0", 2)
    rest = await pool.publications.arrivals(first[-1].entry_id, 100)
    nothing = await pool.publications.arrivals(rest[-1].entry_id, 100)

    assert [arrival.head for arrival in (*first, *rest)] == [(1, 11), (2, 12), (3, 13)]
    assert [arrival.at_ms - first[0].at_ms for arrival in (*first, *rest)] == [0, 10, 20]
    assert list(nothing) == []


async def test_arrivals_of_short_blocks_are_logged_by_key_blocks(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=100_000))
    longest = MAX_KEY_BLOCKS
    for number, blocks in enumerate((11, 3, 4 * longest + 9)):
        await place(pool, f"r{number}", chain=Chain(tuple(range(1, blocks + 1)), 16, 16 * blocks, key_stride=4))

    heads = [arrival.head for arrival in await pool.publications.arrivals("0", 100)]

    assert heads == [(4, 8), (3,), tuple(range(4, 4 * longest + 1, 4))]


async def test_a_published_tree_is_read_back_and_only_a_changed_one_is_a_new_version(
    pool: PoolStore, lease: Lease
) -> None:
    tree = HotnessTree({2**64 - 1: 1, 7: 2})

    versions = [
        await pool.publications.publish_tree(tree, {2**64 - 1: 40, 7: 30}, fence=lease.fence),
        await pool.publications.publish_tree(tree, {2**64 - 1: 41, 7: 31}, fence=lease.fence),
        await pool.publications.publish_tree(HotnessTree({7: 2, 9: 1}), {}, fence=lease.fence),
    ]

    membership = await pool.membership()
    assert versions == [1, 1, 2]
    assert (dict(membership.tree.hot), membership.tree_version) == ({7: 2, 9: 1}, 2)
    assert (await pool.observe([], chain(1))).tree_version == 2


# what was learned --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transfer", [None, (0.1 + 0.2, 1e-5)])
async def test_what_was_learned_is_read_back_with_the_membership(
    pool: PoolStore, lease: Lease, transfer: tuple[float, float] | None
) -> None:
    await pool.members.put_instance(instance("a"))
    learned = Learned(
        3.1, (0.1 + 0.2, 1.5, 0.5, 1e-9, -0.25), transfer=transfer, tpot_s=transfer and 0.04, image_tokens=576.5
    )

    await pool.publications.publish_learned(learned, {"a": 123.4, "gone": 5.0}, fence=lease.fence)

    membership = await pool.membership()
    assert membership.learned == learned
    assert (await pool.loads())["a"].prefill_tokens_per_s == 123.4
    assert list(membership.instances) == ["a"], "nothing is entered of an instance that left"


# repair ------------------------------------------------------------------------------------------------------
async def busy_pool(pool: PoolStore) -> None:
    """Requests in all states on one instance."""
    await pool.members.put_instance(instance("a", prefill_tokens_per_s=100.0))
    for request_id in ("prefilled", "dispatched", "late", "waiting"):
        await hold(pool, request_id, slo_ms=1 if request_id == "late" else 60_000)
    await first_token(pool, "prefilled", "a")
    await sweep(pool, scheduling=DEADLINE)
    assert (await pool.loads())["a"].deferred_tokens == 400


async def test_repair_finds_nothing_where_nothing_is_off(pool: PoolStore) -> None:
    await busy_pool(pool)
    fence, before = await lead(pool), await pool.snapshot()

    assert await pool.upkeep.repair(fence=fence) == 0
    assert (await pool.snapshot()).loads == before.loads


@pytest.mark.parametrize("count", ["pending_tokens", "dispatched_tokens", "deferred_tokens", "context_tokens"])
async def test_repair_adds_up_again_what_drifted(pool: PoolStore, count: str) -> None:
    await busy_pool(pool)
    await drift(pool, "a", count, 7)
    version = (await pool.loads())["a"].version

    assert await pool.upkeep.repair(fence=await lead(pool)) == 1
    await assert_sums_hold(pool)
    assert (await pool.loads())["a"].version > version, "no plan of the wrong figures is committed"
