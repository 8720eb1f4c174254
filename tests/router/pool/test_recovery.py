"""Recovery: what the store lost is entered again, what it still has but is over is finished."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.pool.recovery import Recovered, lost_members, recover_requests, restore_members
from dualmap.scheduling.request.metering import KEPT
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.call_values import Membership
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock, assert_sums_hold, finish, instance, lead, place, record


@pytest.fixture(params=["memory", "valkey"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[PoolStore]:
    """An empty one on a hand clock."""
    if request.param == "memory":
        yield MemoryStore(SCHEDULING, now_ms=HandClock()).pool("default")
        return
    settings = StoreSettings(url=request.getfixturevalue("valkey_url"))
    store = RedisStore(settings, scheduling=SCHEDULING, own_clock=HandClock())
    yield store.pool("default")
    await store.close()


async def recover(pool: PoolStore, *live: StoredRequest) -> Recovered:
    return await recover_requests(pool, await pool.requests_of("one"), live)


async def names(pool: PoolStore) -> dict[str, tuple[str, RequestState]]:
    return {each.request_id: (each.instance_id, each.state) for each in (await pool.snapshot()).requests}


async def pool_with(pool: PoolStore, *request_ids: str, **changes: Any) -> list[StoredRequest]:
    """The records of requests placed on instance a, the first two of them dispatched."""
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    for request_id in request_ids:
        await place(pool, request_id, **changes)
    return [await record(pool, request_id) for request_id in request_ids]


async def test_what_agrees_is_left_as_it_is(pool: PoolStore) -> None:
    live = await pool_with(pool, "sent", "sent too", "held")
    before = await pool.snapshot()

    assert await recover(pool, *live) == Recovered(0, 0)
    assert await pool.snapshot() == before


async def test_what_the_store_lost_is_entered_again(pool: PoolStore) -> None:
    live = await pool_with(pool, "sent", "sent too", "held")
    prefilled = replace(live[0], state=RequestState.PREFILLED, prefilled_ms=live[0].enqueued_ms + 5)
    for request in live:
        await finish(pool, request.request_id)

    assert await recover(pool, prefilled, *live[1:]) == Recovered(0, 3)
    assert await pool.requests_of("one") == [live[2], prefilled, live[1]]
    await assert_sums_hold(pool)


async def test_what_is_over_here_is_finished_in_the_store(pool: PoolStore) -> None:
    live = await pool_with(pool, "lives", "over", "over too")
    await place(pool, "of another", "b", replica_id="two")

    assert await recover(pool, live[0]) == Recovered(2, 0)
    assert list(await names(pool)) == ["lives", "of another"]
    await assert_sums_hold(pool)


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({"state": RequestState.PREFILLED, "prefilled_ms": 5}, ("a", RequestState.PREFILLED)),
        ({"instance_id": "b"}, ("b", RequestState.DISPATCHED)),
        ({"attempt": 2}, ("a", RequestState.DISPATCHED)),
    ],
)
async def test_a_dispatched_request_is_where_its_replica_says(
    pool: PoolStore, changes: dict[str, Any], stored: tuple[str, RequestState]
) -> None:
    (sent,) = await pool_with(pool, "sent")

    assert await recover(pool, replace(sent, enqueued_ms=sent.enqueued_ms + 99, **changes)) == Recovered(0, 1)
    assert await names(pool) == {"sent": stored}
    assert (await record(pool, "sent")).enqueued_ms == sent.enqueued_ms, "it keeps its place"
    await assert_sums_hold(pool)


async def test_a_held_request_is_where_the_store_says(pool: PoolStore) -> None:
    live = await pool_with(pool, "sent", "sent too", "held")
    await pool.queues.migrate(live[2], "b", reason="rebalance", fence=await lead(pool))

    assert await recover(pool, *live) == Recovered(0, 0)
    assert (await record(pool, "held")).instance_id == "b"


async def test_what_was_placed_after_the_store_was_read_stays(pool: PoolStore) -> None:
    live = await pool_with(pool, "before")
    stored = await pool.requests_of("one")
    await place(pool, "just now")

    assert await recover_requests(pool, stored, live) == Recovered(0, 0)
    assert list(await names(pool)) == ["before", "just now"]


async def test_a_request_between_two_tries_is_kept(pool: PoolStore) -> None:
    first, second = await pool_with(pool, "r1", "r2", account="acme ci - m")
    await finish(pool, "r1", replica_id="one", attempt=1, used=KEPT)
    live = [replace(each, instance_id="", attempt=2) for each in (first, second)]

    await recover(pool, *live)

    assert {each.request_id: each.instance_id for each in await pool.requests_of("one")} == {"r1": "", "r2": ""}
    assert await pool.usage.of_day(await pool.usage.today()) == {}
    await assert_sums_hold(pool)


@pytest.mark.parametrize("state", [RequestState.DISPATCHED, RequestState.HELD])
async def test_a_request_that_the_store_has_as_parked_is_entered_where_it_is_now(
    pool: PoolStore, state: RequestState
) -> None:
    placed = await pool_with(pool, "r1", "r2", "r3", account="acme ci - m")
    mine = next(each for each in placed if each.state is state)
    await finish(pool, mine.request_id, replica_id="one", attempt=1)
    await pool.adopt([replace(mine, instance_id="", state=RequestState.HELD)])

    await recover(pool, *placed)

    assert (await record(pool, mine.request_id)).instance_id == mine.instance_id
    await assert_sums_hold(pool)


async def test_a_try_that_is_being_made_stays(pool: PoolStore) -> None:
    (live,) = await pool_with(pool, "r1", account="acme ci - m", attempt=2)

    assert await recover(pool, replace(live, instance_id="")) == Recovered(0, 0)

    assert (await record(pool, "r1")).instance_id == "a"


async def test_another_replicas_live_request_of_the_id_stays(pool: PoolStore) -> None:
    (others,) = await pool_with(pool, "r", replica_id="two")

    await recover(pool, replace(others, replica_id="one"))

    assert (await record(pool, "r")).replica_id == "two"


async def test_members_that_are_missing_are_entered_and_the_known_stay(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", max_running_requests=3))

    assert await restore_members(pool, [instance("a"), instance("b")]) == 1
    known = (await pool.membership()).instances
    assert (list(known), known["a"].max_running_requests) == (["a", "b"], 3)


async def test_a_store_lost_members_if_their_epoch_went_back_or_did_not_see_them_leave(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    known = await pool.membership()
    await pool.members.remove_instance("b")

    def found(epoch: int, *instances: str) -> Membership:
        return replace(known, epoch=epoch, instances={name: instance(name) for name in instances})

    assert not lost_members(known, known)
    assert not lost_members(await pool.membership(), known), "it was removed"
    assert lost_members(found(known.epoch - 1, "a", "b"), known)
    assert lost_members(found(known.epoch, "a"), known)
    assert not lost_members(found(known.epoch, "a", "b", "c"), known)
