"""A pool whose queue order is changed while requests are held: the leader's repair lists them as the new one says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis

from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore
from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock, instance, reservation

DEADLINE = SCHEDULING.model_copy(update={"queue_order": "deadline"})
OpenPool = Callable[[SchedulingSettings], Awaitable[PoolStore]]


@pytest.fixture
async def open_pool(valkey_url: str, clock: HandClock) -> AsyncIterator[OpenPool]:
    """The same pool as processes of either setting see it."""
    stores: list[RedisStore] = []

    async def open_as(scheduling: SchedulingSettings) -> PoolStore:
        store = RedisStore(StoreSettings(url=valkey_url), scheduling=scheduling, test_clock=clock)
        stores.append(store)
        await store.open()
        return store.pool("default")

    yield open_as
    for store in stores:
        await store.close()


async def order_of(pool: PoolStore) -> list[str]:
    snapshot = await pool.queue("a")
    assert snapshot is not None
    return [held.request_id for held in snapshot.held]


async def fill(pool: PoolStore) -> int:
    """One running and three held, the first of these without a chance to be on time; the leader's fence."""
    lease = await pool.acquire_lease("worker", 3_600_000)
    assert lease is not None
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    for request_id, slo_ms in (("running", 60_000), ("hopeless", 1), ("relaxed", 50_000), ("urgent", 20_000)):
        await pool.reserve(reservation(request_id, slo_ms=slo_ms))
    return lease.fence


async def test_from_arrival_to_deadline(open_pool: OpenPool) -> None:
    fifo, deadline = await open_pool(SCHEDULING), await open_pool(DEADLINE)
    fence = await fill(fifo)
    assert await order_of(fifo) == ["hopeless", "relaxed", "urgent"]

    assert await deadline.repair(fence=fence) == 1
    await deadline.grant_overdue(fence=fence)

    assert await order_of(deadline) == ["urgent", "relaxed", "hopeless"]
    assert (await deadline.loads())["a"].behind_tokens == 400
    assert await deadline.repair(fence=fence) == 0


async def test_from_deadline_to_arrival_nobody_is_left_behind(open_pool: OpenPool) -> None:
    fifo, deadline = await open_pool(SCHEDULING), await open_pool(DEADLINE)
    fence = await fill(deadline)
    assert await order_of(deadline) == ["urgent", "relaxed", "hopeless"]

    assert await fifo.repair(fence=fence) == 1

    assert await order_of(fifo) == ["hopeless", "relaxed", "urgent"]
    assert (await fifo.loads())["a"].behind_tokens == 0
    await fifo.finish("running")
    assert await order_of(fifo) == ["relaxed", "urgent"]
    assert await fifo.repair(fence=fence) == 0


async def test_what_is_listed_wrongly_is_listed_right_again(open_pool: OpenPool, valkey_url: str) -> None:
    deadline = await open_pool(DEADLINE)
    fence = await fill(deadline)
    keys = PoolKeys("dualmap", "default").account("a")
    with redis.Redis.from_url(valkey_url) as client:
        client.zadd(keys.queue, {"hopeless": 7, "nobody": 8, "urgent": 9})
        client.zadd(keys.late, {"relaxed": 1})
        client.hset(keys.account, "late_requests", 5)

    assert await deadline.repair(fence=fence) == 1

    assert await order_of(deadline) == ["urgent", "relaxed", "hopeless"]
    load = (await deadline.loads())["a"]
    assert (load.queued_requests, load.behind_tokens, load.pending_tokens) == (3, 400, 1600)
    assert await deadline.repair(fence=fence) == 0
