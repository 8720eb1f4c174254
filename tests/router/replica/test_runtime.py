"""A replica put together: it joins, it stops, and stopping leaves nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.replica.runtime import Runtime, make_replica_id
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools


async def test_a_store_out_of_reach_stops_the_start_and_it_can_be_tried_again(
    store: Any, scheduling: Any, clock: Any
) -> None:
    tampered = tools.Tampered(store)

    async def away() -> None:
        raise StoreUnavailableError("away")

    tampered.before["membership"] = away
    runtime = Runtime(RouterSettings(), scheduling, tampered, [PoolSettings()], clock=clock)
    with pytest.raises(StoreUnavailableError):
        await runtime.start()
    assert not runtime.accepts_traffic

    tampered.before.clear()
    await runtime.start()

    assert runtime.accepts_traffic
    await runtime.stop()


async def test_stopping_releases_what_is_in_flight_and_delivers_it(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    for _ in range(3):
        await runtime.intake.place(tools.request())

    await runtime.stop()

    snapshot = await store.pool("default").snapshot()
    assert (snapshot.requests, snapshot.replicas) == ((), ())
    assert len(runtime.context.live) == 0


async def test_room_that_the_last_releases_make_is_granted_before_the_replica_is_gone(
    start_runtime: Any, store: Any
) -> None:
    tampered = tools.Tampered(store)

    async def slow(*_: Any, **__: Any) -> None:
        for _round in range(200):
            await asyncio.sleep(0)

    tampered.before["commit"] = slow
    leaving = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    staying = await start_runtime()
    await leaving.intake.place(tools.request("word " * 1000))
    waiting = asyncio.create_task(staying.intake.place(tools.request()))
    await tools.settle()
    assert not waiting.done()

    await leaving.stop()

    (record,) = (await store.pool("default").snapshot()).requests
    assert (record.replica_id, record.state) == (staying.context.replica_id, RequestState.DISPATCHED)
    (await waiting).finish(Outcome.COMPLETED)


async def test_no_task_outlives_a_stopped_replica(store: Any, scheduling: Any, clock: Any) -> None:
    before = asyncio.all_tasks()
    runtime = Runtime(RouterSettings(), scheduling, store, [PoolSettings()], clock=clock)
    await runtime.start()
    assert asyncio.all_tasks() > before

    await runtime.stop()
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == before


def test_replica_ids_are_unique_and_fit_the_stores_keys() -> None:
    ids = {make_replica_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(RouterSettings(replica_id=each).replica_id == each for each in ids)
