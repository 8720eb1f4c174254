"""The store contract: replicas that live, die, come back and adopt; on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock, first_token, instance, lead, place, sweep


async def test_a_heartbeat_says_whether_the_replica_was_known(pool: PoolStore, clock: HandClock) -> None:
    first = await pool.heartbeat("one", 1000, {"address": "10.0.0.1:8000"})
    clock.advance(999)
    second = await pool.heartbeat("one", 1000, {"address": "10.0.0.1:8000"})
    clock.advance(1000)
    too_late = await pool.heartbeat("one", 1000, {})

    assert (first, second, too_late) == (False, True, False)
    replica = (await pool.snapshot()).replicas[0]
    assert (replica.replica_id, replica.expires_ms, dict(replica.info)) == ("one", clock.now_ms + 1000, {})


async def test_a_replica_that_died_before_the_clock_was_set_back_is_reaped_all_the_same(
    pool: PoolStore, clock: HandClock
) -> None:
    await pool.heartbeat("one", 1000, {})
    await pool.members.put_instance(instance("a"))
    await place(pool, "left", replica_id="one")
    await place(pool, "met", replica_id="two")

    clock.advance(-600_000)
    fence = await lead(pool)

    assert await pool.upkeep.expired_replicas() == {"one": False, "two": False}
    assert await pool.heartbeat("two", 1000, {}) is False
    assert await pool.upkeep.reap("one", fence=fence) == 1
    assert await pool.upkeep.reap("two", fence=fence) == 0


async def test_a_replicas_own_requests_are_told_in_the_order_of_their_reservation(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    for request_id, replica_id in (("first", "one"), ("another's", "two"), ("last", "one")):
        await place(pool, request_id, replica_id=replica_id)

    own = await pool.requests_of("one")

    assert [(record.request_id, record.state) for record in own] == [
        ("first", RequestState.DISPATCHED),
        ("last", RequestState.HELD),
    ]
    assert await pool.requests_of("nobody") == []


async def test_an_expired_replica_is_reaped_with_everything_it_had(pool: PoolStore, clock: HandClock) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    await pool.heartbeat("two", 60_000, {})
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    await place(pool, "prefilled", replica_id="one")
    await first_token(pool, "prefilled", "a")
    await place(pool, "dispatched", replica_id="one")
    await place(pool, "held", replica_id="one")
    await place(pool, "survivor", replica_id="two")
    clock.advance(1000)

    expired = await pool.upkeep.expired_replicas()
    reaped = await pool.upkeep.reap("one", fence=fence)

    view = await pool.snapshot()
    assert expired == {"one": False}
    assert reaped == 3
    assert [request.request_id for request in view.requests] == ["survivor"]
    assert view.loads["a"].pending_tokens == 400
    assert [replica.replica_id for replica in view.replicas] == ["two"]
    assert await pool.upkeep.expired_replicas() == {}
    assert await sweep(pool) == 1, "the leader gives the room away"


async def test_an_overview_is_a_snapshot_without_its_requests(pool: PoolStore) -> None:
    await lead(pool)
    await pool.heartbeat("one", 60_000, {"traffic": "ended=3"})
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    await place(pool, "r")

    overview, snapshot = await pool.overview(), await pool.snapshot()

    assert list(overview.loads) == ["a", "b"]
    assert sum(load.running_requests for load in overview.loads.values()) == 1
    for name in ("loads", "replicas", "leader", "migrations"):
        assert getattr(overview, name) == getattr(snapshot, name)


async def test_a_replica_that_is_alive_is_not_reaped(pool: PoolStore) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 1000, {})
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")

    assert await pool.upkeep.reap("one", fence=fence) == 0
    assert len((await pool.snapshot()).requests) == 1


async def test_a_replica_that_only_reserves_is_reaped_after_its_first_lease(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r", replica_id="silent")
    at_once = await pool.upkeep.expired_replicas()

    clock.advance(10_000)

    assert (at_once, await pool.upkeep.expired_replicas()) == ({}, {"silent": False})


@pytest.mark.parametrize("retired", [False, True])
async def test_a_reservation_of_a_replica_without_a_running_lease_gives_it_another_first_one(
    pool: PoolStore, clock: HandClock, retired: bool
) -> None:
    fence = await lead(pool)
    await pool.members.put_instance(instance("a"))
    await pool.heartbeat("one", 1000, {})
    if retired:
        await pool.retire("one")
    clock.advance(1000)
    expired = list(await pool.upkeep.expired_replicas())

    await place(pool, "late")

    reaped = await pool.upkeep.reap("one", fence=fence)
    clock.advance(9_999)
    assert (expired, reaped, list(await pool.upkeep.expired_replicas())) == (["one"], 0, [])
    assert await pool.heartbeat("one", 1000, {}) is False
    clock.advance(1000)
    assert await pool.upkeep.reap("one", fence=fence) == 1


async def test_a_request_that_moves_while_requests_are_read_is_not_missed(
    server_url: str, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING, own_clock=clock)
    pool = store.pool("default")
    fence = await lead(pool)
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, dispatch_window_tokens=1))
        await place(pool, f"first-on-{name}", name)
    await place(pool, "moves", "b")
    held = (await pool.records(["moves"]))["moves"]
    together, queue_of_a = pool._calls.together, PoolKeys("dualmap", "default").queue("a")

    async def then_move(commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = await together(commands)
        if any(queue_of_a in command for command in commands):
            await pool.queues.migrate(held, "a", reason="rebalance", fence=fence)
        return replies

    monkeypatch.setattr(pool._calls, "together", then_move)
    found = [request.request_id for request in await pool.requests_of("one")]
    monkeypatch.undo()
    await store.close()

    assert sorted(found) == ["first-on-a", "first-on-b", "moves"]


async def test_a_request_that_comes_while_its_replica_is_reaped_keeps_an_owner(
    server_url: str, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING, own_clock=clock)
    pool = store.pool("default")
    fence = await lead(pool)
    await pool.members.put_instance(instance("a"))
    await pool.heartbeat("one", 1000, {})
    clock.advance(1000)
    listed = pool.upkeep._views.requests_of

    async def then_reserve(replica_id: str) -> Sequence[StoredRequest]:
        found = await listed(replica_id)
        await place(pool, "late")
        return found

    monkeypatch.setattr(pool.upkeep._views, "requests_of", then_reserve)
    reaped = await pool.upkeep.reap("one", fence=fence)
    monkeypatch.undo()
    clock.advance(10_000)

    assert (reaped, list(await pool.upkeep.expired_replicas())) == (0, ["one"])
    assert await pool.upkeep.reap("one", fence=fence) == 1
    await store.close()


async def test_a_retired_replica_is_gone_from_view_and_its_leftovers_are_reaped(pool: PoolStore) -> None:
    fence = await lead(pool)
    await pool.heartbeat("one", 60_000, {})
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")

    await pool.retire("one")

    assert (await pool.snapshot()).replicas == ()
    assert await pool.upkeep.expired_replicas() == {"one": True}
    assert await pool.upkeep.reap("one", fence=fence) == 1
    assert await pool.heartbeat("one", 60_000, {}) is False


async def test_adopted_requests_are_entered_as_they_were_and_known_ones_stay(store: object) -> None:
    lived, lost = store.pool("lived"), store.pool("lost")  # type: ignore[attr-defined]
    for pool in (lived, lost):
        await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    await place(lived, "prefilled")
    await first_token(lived, "prefilled", "a")
    await place(lived, "dispatched")
    await place(lived, "held", alternative_id="b", alternative_uncached_tokens=9)
    before = await lived.snapshot()

    adopted = await lost.adopt(before.requests)
    again = await lost.adopt(before.requests)

    after = await lost.snapshot()
    assert (adopted, again) == (3, 0)
    assert after.requests == before.requests
    for figure in ("pending_tokens", "dispatched_tokens", "context_tokens", "running_requests", "queued_requests"):
        assert getattr(after.loads["a"], figure) == getattr(before.loads["a"], figure)


async def test_a_request_of_an_unknown_instance_is_not_adopted(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")
    (record,) = (await pool.snapshot()).requests

    assert await pool.adopt([replace(record, request_id="lost", instance_id="nobody")]) == 0
