"""Awaiting: the pool has no instance, and the first one is being started for the request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.errors import InstanceStartingError, NoInstanceError
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.leases import ENDED_FIELD, LIVE_FIELD, WAITING_FIELD
from tests.router import tools


def pool(least: int = 0, **autoscale: Any) -> tuple[PoolSettings]:
    settings = AutoscaleSettings(min_instances=least, max_instances=2, start_s=10.0, **autoscale)
    return (PoolSettings(autoscale=settings),)


async def reported(store: Any, name: str) -> list[str | None]:
    """A field that the replicas told the store of."""
    return [replica.info.get(name) for replica in (await store.pool("default").overview()).replicas]


async def place(runtime: Any, *numbers: int) -> list[asyncio.Task[Any]]:
    tasks = [
        asyncio.create_task(runtime.intake.place(tools.request(f"prompt {number}", request_id=f"r{number}")))
        for number in numbers
    ]
    await tools.settle()
    return tasks


async def test_requests_wait_for_the_first_instance_and_go_there(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(pools=pool())
    placing = await place(runtime, *range(20))
    await clock.advance(20.0)
    assert not any(task.done() for task in placing)

    await store.pool("default").members.put_instance(tools.spec("a"))
    await store.pool("default").members.set_instance_state("a", InstanceState.READY)
    await clock.advance(1.0)

    assert {(await task).machine.instance_id for task in placing} == {"a"}
    for task in placing:
        task.result().finish(Outcome.COMPLETED)
    assert runtime.pools.pools["default"].waiting_room.waiting == 0


async def test_the_store_is_told_at_once_that_requests_wait(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(pools=pool())
    assert await reported(store, WAITING_FIELD) == ["0"]
    placing = await place(runtime, 1, 2)
    await tools.settle()

    assert await reported(store, WAITING_FIELD) in (["1"], ["2"])
    await clock.advance(5.0)
    assert (await reported(store, WAITING_FIELD), await reported(store, LIVE_FIELD)) == (["2"], ["2"])
    for task in placing:
        task.cancel()
    await asyncio.gather(*placing, return_exceptions=True)
    await clock.advance(5.0)
    assert await reported(store, WAITING_FIELD) == ["0"]
    assert await reported(store, ENDED_FIELD) == ["2"]


async def test_a_pool_that_has_instances_at_all_times_refuses_as_before_and_tells_nothing(
    start_runtime: Any, store: Any
) -> None:
    runtime = await start_runtime(pools=pool(least=1))
    (placing,) = await place(runtime, 1)
    with pytest.raises(NoInstanceError):
        await placing
    assert await reported(store, WAITING_FIELD) == [None]


async def test_who_waited_in_vain_is_told_what_to_do_and_when_to_come_again(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(pools=pool())
    (placing,) = await place(runtime, 1)
    await clock.advance(39.0)
    assert not placing.done()
    await clock.advance(1.1)

    with pytest.raises(InstanceStartingError, match=r"none became ready within 40 s.*inspect scaling") as refused:
        await placing
    assert (refused.value.status, refused.value.retry_after_s) == (503, 10.0)
    assert len(runtime.context.live) == 0


async def test_no_more_wait_than_may(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(pools=pool(max_waiting=2))
    first, second, third = await place(runtime, 1, 2, 3)
    with pytest.raises(InstanceStartingError, match="max_waiting") as refused:
        await third
    assert refused.value.status == 503
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    (fourth,) = await place(runtime, 4)
    assert not fourth.done()
    fourth.cancel()
    await asyncio.gather(fourth, return_exceptions=True)


async def test_requests_that_are_passed_on_wait_as_well(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(pools=pool())
    passed_on = tools.request(path="/new", prompt=None)
    placing = asyncio.create_task(runtime.intake.place(passed_on))
    await clock.advance(5.0)
    assert not placing.done()
    await store.pool("default").members.put_instance(tools.spec("a"))
    await store.pool("default").members.set_instance_state("a", InstanceState.READY)
    await clock.advance(1.0)

    request = await placing
    assert request.machine.instance_id == "a"
    request.finish(Outcome.COMPLETED)
