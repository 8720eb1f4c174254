"""The store contract: many callers at once. Two replicas are two stores on one server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from dualmap.statestore.connect import Store
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from tests.statestore.samples import (
    CHAIN,
    SCHEDULING,
    HandClock,
    assert_sums_hold,
    finish,
    first_token,
    grant,
    instance,
    lead,
    place,
    placement,
    record,
)

Pools = tuple[PoolStore, PoolStore]


@pytest.fixture
async def pools(store: Store, clock: HandClock) -> AsyncIterator[Pools]:
    """The pool as two replicas see it, each over a connection of its own where there are connections."""
    if not isinstance(store, RedisStore):
        yield store.pool("default"), store.pool("default")
        return
    other = RedisStore(store.settings, scheduling=SCHEDULING, own_clock=clock)
    await other.open()
    yield store.pool("default"), other.pool("default")
    await other.close()


async def test_of_a_hundred_at_once_exactly_those_that_fit_are_admitted(pools: Pools) -> None:
    await pools[0].members.put_instance(
        instance("a", dispatch_window_tokens=4000, max_running_requests=80, max_queued_requests=60)
    )

    replies = await asyncio.gather(
        *(place(pools[number % 2], f"r{number}", replica_id=("one", "two")[number % 2]) for number in range(100))
    )

    assert Counter(reply.status for reply in replies) == {"dispatched": 10, "held": 60, "queue_full": 30}
    await assert_sums_hold(pools[0])


async def test_two_replicas_that_saw_the_same_gap_do_not_both_fill_it(pools: Pools) -> None:
    """A policy that chooses: it says what its choice holds for."""
    await pools[0].members.put_instance(instance("a"))

    replies = await asyncio.gather(
        *(place(pool, name, replica_id=name, max_pending_tokens=0) for pool, name in zip(pools, "xy", strict=True))
    )

    assert sorted(reply.status for reply in replies) == ["dispatched", "stale"]


async def test_one_request_placed_many_times_at_once_counts_once(pools: Pools) -> None:
    await pools[0].members.put_instance(instance("a"))

    replies = await asyncio.gather(*(place(pools[number % 2], "r") for number in range(40)))

    assert {reply.status for reply in replies} == {"dispatched"}
    assert (await pools[0].loads())["a"].pending_tokens == 400


async def test_of_two_requests_of_one_id_one_is_told_that_the_other_lives(pools: Pools) -> None:
    await pools[0].members.put_instance(instance("a"))

    replies = await asyncio.gather(
        *(pool.place(placement("r", replica_id=name)) for pool, name in zip(pools, "xy", strict=True))
    )

    assert sorted(reply.status for reply in replies) == ["dispatched", "duplicate"]


async def test_of_all_who_plan_the_same_room_one_fills_it(pools: Pools) -> None:
    await pools[0].members.put_instance(instance("a", dispatch_window_tokens=400, max_queued_requests=50))
    for number in range(30):
        await place(pools[0], f"r{number:02d}")
    told = (await finish(pools[0], "r00")).queue

    granted = await asyncio.gather(*(grant(pools[number % 2], told) for number in range(20)))

    assert sum(granted) == 1
    assert (await pools[0].loads())["a"].running_requests == 1
    await assert_sums_hold(pools[0])


async def test_first_tokens_ends_moves_and_plans_at_once_leave_nothing_behind(pools: Pools) -> None:
    for name in ("a", "b"):
        await pools[0].members.put_instance(instance(name, max_queued_requests=100))
    fence = await lead(pools[0])
    names = [f"r{number}" for number in range(60)]
    for name in names:
        await place(pools[0], name, "a", "b")
    held = await pools[0].records(names)

    async def live(name: str, mine: PoolStore, others: PoolStore) -> int:
        first, moved = await asyncio.gather(
            first_token(mine, name, "a"), others.queues.migrate(held[name], "b", reason="benefit", fence=fence)
        )
        await asyncio.gather(grant(mine, first.queue), grant(others, moved.queue))
        await first_token(mine, name, "b")
        ended = await asyncio.gather(finish(mine, name), finish(others, name))
        for each in ended:
            await grant(mine, each.queue)
        return sum(each.done for each in ended)

    finished = await asyncio.gather(
        *(live(name, pools[number % 2], pools[1 - number % 2]) for number, name in enumerate(names))
    )

    assert finished == [1] * len(names)
    view = await pools[0].snapshot()
    assert view.requests == ()
    await assert_sums_hold(pools[0])


async def test_a_request_that_two_leaders_would_move_moves_once(pools: Pools) -> None:
    for name in ("a", "b", "c"):
        await pools[0].members.put_instance(instance(name, dispatch_window_tokens=1))
        await place(pools[0], f"first-on-{name}", name)
    await place(pools[0], "r", "a")
    fence, held = await lead(pools[0]), await record(pools[0], "r")

    moved = await asyncio.gather(
        *(
            pools[number % 2].queues.migrate(held, "bc"[number % 2], reason="benefit", fence=fence)
            for number in range(10)
        )
    )

    assert Counter(each.status for each in moved) == {"migrated": 1, "not_held": 9}
    await assert_sums_hold(pools[0])


async def test_what_two_replicas_enter_again_while_others_are_placed_is_entered_once(pools: Pools) -> None:
    for name in ("a", "b"):
        await pools[0].members.put_instance(instance(name, max_running_requests=1000, max_queued_requests=1000))
    for number in range(120):
        await place(pools[0], f"r{number}", "ab"[number % 2], replica_id="one")
    live = (await pools[0].snapshot()).requests
    await asyncio.gather(*(finish(pools[0], request.request_id) for request in live))

    adopted, again, *_ = await asyncio.gather(
        *(pool.adopt(live) for pool in pools),
        *(place(pools[number % 2], f"new{number}", "ab"[number % 2]) for number in range(20)),
    )

    assert adopted + again == 120
    assert len((await pools[0].snapshot()).requests) == 140
    await assert_sums_hold(pools[0])


async def test_of_many_workers_one_leads(pools: Pools) -> None:
    leases = await asyncio.gather(
        *(pools[number % 2].leader_lease.acquire(f"worker-{number}", 1000) for number in range(20))
    )

    assert len([lease for lease in leases if lease is not None]) == 1


async def test_changes_of_one_instance_at_once_are_all_made(pools: Pools) -> None:
    await pools[0].members.put_instance(instance("a"))
    changes = {"url": "http://new", "kv_capacity_tokens": 7, "max_running_requests": 5, "max_queued_requests": 6}

    await asyncio.gather(
        *(
            pools[number % 2].members.update_instance("a", {name: value})
            for number, (name, value) in enumerate(changes.items())
        ),
        *(place(pools[number % 2], f"r{number}", chain=CHAIN) for number in range(3)),
    )

    membership = await pools[1].membership()
    assert (membership.instances["a"], membership.epoch) == (instance("a", **changes), 5)
    await assert_sums_hold(pools[0])


async def test_an_instance_is_not_removed_with_a_request_that_comes_meanwhile(pools: Pools) -> None:
    for number in range(20):
        await pools[0].members.put_instance(instance("a"))

        placed, removed = await asyncio.gather(place(pools[0], f"r{number}"), pools[1].members.remove_instance("a"))

        assert (placed.status, removed) in (("dispatched", False), ("not_ready", True))
        await finish(pools[0], f"r{number}")
