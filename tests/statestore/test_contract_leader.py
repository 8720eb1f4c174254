"""The store contract: leadership, queues, migration, hotness, repair; on every backend."""

from __future__ import annotations

import asyncio

import pytest

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceState, Role
from statestore.base import MigrateStatus, PoolStore, RequestState
from statestore.errors import LeaseLostError
from statestore.leases import Lease
from tests.statestore.samples import CHAIN, HandClock, chain, instance, reservation


@pytest.fixture
async def lease(pool: PoolStore) -> Lease:
    taken = await pool.acquire_lease("worker-1", 10_000)
    assert taken is not None
    return taken


async def one_held_on_a(pool: PoolStore, **changes: object) -> None:
    """Request ``r`` held on instance a, its other candidate b being idle."""
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    await pool.put_instance(instance("b", dispatch_window_tokens=400, **changes))
    await pool.reserve(reservation("sent"))
    await pool.reserve(reservation("r", chain=CHAIN, alternative_id="b", alternative_uncached_tokens=100))


# leases ------------------------------------------------------------------------------------------------------
async def test_one_leads_until_the_lease_runs_out_and_the_next_has_a_higher_fence(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    refused = await pool.acquire_lease("worker-2", 10_000)
    again = await pool.acquire_lease("worker-1", 10_000)
    clock.advance(10_000)
    next_lease = await pool.acquire_lease("worker-2", 10_000)

    assert refused is None
    assert again == lease
    assert next_lease is not None
    assert next_lease.fence > lease.fence


async def test_a_renewed_lease_lasts_and_a_lost_one_cannot_be_renewed(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    clock.advance(9_000)
    renewed = await pool.renew_lease(lease, 10_000)
    clock.advance(9_000)
    assert await pool.acquire_lease("worker-2", 10_000) is None

    clock.advance(1_000)

    assert renewed.expires_ms == lease.expires_ms + 9_000
    with pytest.raises(LeaseLostError):
        await pool.renew_lease(renewed, 10_000)


async def test_a_lease_ends_when_the_clock_is_set_back_instead_of_when_it_has_caught_up(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    clock.advance(-10_000)
    renewed = await pool.renew_lease(lease, 10_000)
    assert renewed == Lease("worker-1", lease.fence, clock.now_ms + 10_000), "a small step changes no leader"
    clock.advance(-600_000)

    assert (await pool.snapshot()).leader is None
    with pytest.raises(LeaseLostError):
        await pool.renew_lease(lease, 10_000)
    successor = await pool.acquire_lease("worker-2", 10_000)
    assert successor is not None
    assert successor.fence == lease.fence + 1


async def test_a_released_lease_is_free_at_once_and_releasing_again_harms_nobody(pool: PoolStore, lease: Lease) -> None:
    await pool.release_lease(lease)
    successor = await pool.acquire_lease("worker-2", 10_000)

    await pool.release_lease(lease)

    assert successor is not None
    assert (await pool.snapshot()).leader == successor


async def test_a_deposed_leader_changes_nothing(pool: PoolStore, clock: HandClock, lease: Lease) -> None:
    await one_held_on_a(pool)
    clock.advance(10_000)
    assert await pool.acquire_lease("worker-2", 10_000) is not None
    before = await pool.snapshot()

    for write in (
        pool.migrate("r", "a", "b", reason="benefit", fence=lease.fence),
        pool.set_instance_state("a", InstanceState.DOWN, fence=lease.fence),
        pool.publish_tree(HotnessTree({1: 1}), {1: 9}, fence=lease.fence),
        pool.reap("one", fence=lease.fence),
        pool.repair(fence=lease.fence),
    ):
        with pytest.raises(LeaseLostError):
            await write

    assert await pool.snapshot() == before


# queues and migration ----------------------------------------------------------------------------------------
async def test_a_queue_is_shown_in_the_order_of_granting_with_the_other_candidates_loads(pool: PoolStore) -> None:
    await one_held_on_a(pool)
    await pool.reserve(reservation("later"))

    queue = await pool.queue("a")

    assert queue is not None
    assert [request.request_id for request in queue.held] == ["r", "later"]
    assert queue.load.pending_tokens == 1200
    assert list(queue.alternatives) == ["b"]
    assert await pool.queue("nobody") is None


async def test_a_migrated_request_swaps_its_candidates_and_is_dispatched_where_there_is_room(
    pool: PoolStore, lease: Lease
) -> None:
    await one_held_on_a(pool)
    await pool.reserve(reservation("former", "b", chain=chain(*CHAIN.hashes[:3])))
    await pool.finish("former")

    status = await pool.migrate("r", "a", "b", reason="benefit", fence=lease.fence)

    view = await pool.snapshot()
    moved = next(request for request in view.requests if request.request_id == "r")
    assert status is MigrateStatus.MIGRATED
    assert (moved.instance_id, moved.uncached_tokens, moved.state) == ("b", 100, RequestState.DISPATCHED)
    assert (moved.alternative_id, moved.alternative_uncached_tokens) == ("a", 400)
    assert (view.loads["a"].pending_tokens, view.loads["b"].pending_tokens) == (400, 100)
    assert view.migrations == {"benefit": 1}


async def test_a_request_moved_beyond_its_pair_counts_its_full_prompt(pool: PoolStore, lease: Lease) -> None:
    await one_held_on_a(pool)
    await pool.put_instance(instance("c"))

    await pool.migrate("r", "a", "c", reason="evacuation", fence=lease.fence)

    assert (await pool.loads())["c"].pending_tokens == 400


async def test_what_is_not_held_there_or_cannot_go_there_stays(pool: PoolStore, lease: Lease) -> None:
    await one_held_on_a(pool, max_queued_requests=0, max_running_requests=1)
    await pool.put_instance(instance("down", state=InstanceState.DOWN))
    await pool.put_instance(instance("decoder", role=Role.DECODE))
    await pool.reserve(reservation("occupies-b", "b"))

    async def migrate(request_id: str, source: str, target: str) -> MigrateStatus:
        return await pool.migrate(request_id, source, target, reason="benefit", fence=lease.fence)

    answers = [
        await migrate("sent", "a", "b"),
        await migrate("unknown", "a", "b"),
        await migrate("r", "b", "a"),
        await migrate("r", "a", "down"),
        await migrate("r", "a", "decoder"),
        await migrate("r", "a", "a"),
        await migrate("r", "a", "b"),
    ]

    assert answers == [
        MigrateStatus.NOT_HELD,
        MigrateStatus.NOT_HELD,
        MigrateStatus.NOT_HELD,
        MigrateStatus.NOT_READY,
        MigrateStatus.NOT_READY,
        MigrateStatus.NOT_READY,
        MigrateStatus.QUEUE_FULL,
    ]


async def test_a_wish_for_a_rebalance_is_handed_out_once(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a"))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("r1", "b", overloaded=True))
    clock.advance(1)
    await pool.reserve(reservation("r2", "a", overloaded=True))
    await pool.reserve(reservation("r3", "b", overloaded=True))

    first, second = await pool.wanted_rebalances(5), await pool.wanted_rebalances(0)

    assert list(first) == ["b", "a"]
    assert list(second) == []


async def test_waiting_for_a_wish_ends_when_one_comes(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    waiting = asyncio.create_task(_result(pool.wanted_rebalances(30)))
    await asyncio.sleep(0.05)

    await pool.reserve(reservation("r", overloaded=True))

    assert list(await asyncio.wait_for(waiting, 5)) == ["a"]


async def test_waiting_for_a_wish_can_be_given_up_without_losing_the_next(
    pool: PoolStore, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["store"] == "fakeredis":
        pytest.skip("fakeredis hands an element to a blocked client that has left")
    await pool.put_instance(instance("a"))
    waiting = asyncio.create_task(_result(pool.wanted_rebalances(30)))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.05)

    await pool.reserve(reservation("r", overloaded=True))

    assert list(await pool.wanted_rebalances(5)) == ["a"]


async def _result(awaitable: object) -> object:
    return await awaitable  # type: ignore[misc]


# hotness -----------------------------------------------------------------------------------------------------
async def test_arrivals_are_read_on_from_the_last_one_seen_and_count_a_retry_once(
    pool: PoolStore, clock: HandClock
) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=10_000))
    for number in range(3):
        await pool.reserve(reservation(f"r{number}", chain=chain(number + 1, number + 11)))
        clock.advance(10)
    await pool.reserve(reservation("r0", attempt=2))

    first = await pool.arrivals("0", 2)
    rest = await pool.arrivals(first[-1].entry_id, 100)
    nothing = await pool.arrivals(rest[-1].entry_id, 100)

    assert [arrival.head for arrival in (*first, *rest)] == [(1, 11), (2, 12), (3, 13)]
    assert [arrival.at_ms - first[0].at_ms for arrival in (*first, *rest)] == [0, 10, 20]
    assert list(nothing) == []


async def test_a_published_tree_is_read_back_and_only_a_changed_one_is_a_new_version(
    pool: PoolStore, lease: Lease
) -> None:
    tree = HotnessTree({2**64 - 1: 1, 7: 2})

    versions = [
        await pool.publish_tree(tree, {2**64 - 1: 40, 7: 30}, fence=lease.fence),
        await pool.publish_tree(tree, {2**64 - 1: 41, 7: 31}, fence=lease.fence),
        await pool.publish_tree(HotnessTree({7: 2, 9: 1}), {}, fence=lease.fence),
    ]

    membership = await pool.membership()
    assert versions == [1, 1, 2]
    assert (dict(membership.tree.hot), membership.tree_version) == ({7: 2, 9: 1}, 2)
    assert (await pool.observe([], chain(1))).tree_version == 2


# repair ------------------------------------------------------------------------------------------------------
async def test_repair_finds_nothing_where_nothing_is_off(pool: PoolStore, lease: Lease) -> None:
    await one_held_on_a(pool)
    before = await pool.snapshot()

    assert await pool.repair(fence=lease.fence) == 0
    assert await pool.snapshot() == before


async def test_repair_puts_times_that_lie_ahead_of_a_clock_set_back_to_now(
    pool: PoolStore, clock: HandClock, lease: Lease
) -> None:
    await one_held_on_a(pool)
    clock.advance(-3_600_000)
    back = await pool.acquire_lease("worker-1", 60_000)
    assert back is not None
    clock.advance(3_000)

    blind = (await pool.loads())["a"].stalled_s
    repaired = await pool.repair(fence=back.fence)
    clock.advance(5_000)

    held = (await pool.records(["r"]))["r"]
    assert (blind, repaired, held.enqueued_ms) == (0.0, 0, clock.now_ms - 5_000)
    assert (await pool.loads())["a"].stalled_s == 5.0
