"""Placing: a request whose id is taken gets another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.errors import (
    QueueFullError,
)
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.request import RequestState
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, live, nothing_is_left


async def test_an_id_that_is_live_on_this_replica_gets_a_suffix(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    first = await runtime.intake.place(tools.request(request_id="mine"))

    second = await runtime.intake.place(tools.request(request_id="mine"))

    assert first.request_id == "mine"
    assert second.request_id.startswith("mine-")
    assert len(await live(store)) == 2
    for request in (first, second):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_an_id_whose_release_is_on_its_way_gets_a_suffix(start_runtime: Any, store: Any) -> None:
    tampered, goes = tools.Tampered(store), asyncio.Event()
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)

    async def waits(*_: Any, **__: Any) -> None:
        await goes.wait()

    tampered.before["release"] = waits
    first = await runtime.intake.place(tools.request(request_id="mine"))
    first.finish(Outcome.CLIENT_GONE)

    second = await runtime.intake.place(tools.request(request_id="mine"))
    goes.set()
    await tools.settle()
    third = await runtime.intake.place(tools.request(request_id="mine"))

    assert second.request_id.startswith("mine-")
    assert third.request_id == "mine"
    assert set(await live(store)) == {second.request_id, third.request_id}
    for request in (second, third):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_who_leaves_before_its_id_is_known_to_be_taken_releases_nothing_of_the_other_replica(
    start_runtime: Any, store: Any
) -> None:
    tampered = tools.Tampered(store)
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime(through=lambda _: tampered)
    first = await one.intake.place(tools.request(request_id="same"))
    reserving = asyncio.Event()

    async def under_way(*_: Any) -> None:
        reserving.set()
        await asyncio.Event().wait()

    tampered.before["place"] = under_way
    leaving = asyncio.create_task(other.intake.place(tools.request(request_id="same")))
    await reserving.wait()
    leaving.cancel()
    await tools.settle()

    assert "release" in tampered.calls
    assert (await store.pool("default").records(["same"]))["same"].replica_id == "replica-1"
    first.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, one)


async def test_an_id_that_is_live_on_another_replica_gets_a_suffix(start_runtime: Any, store: Any) -> None:
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime()
    first = await one.intake.place(tools.request(request_id="mine"))

    second = await other.intake.place(tools.request(request_id="mine"))

    assert second.request_id.startswith("mine-")
    second.finish(Outcome.COMPLETED)
    assert other.context.decisions.get(second.request_id) is not None
    await tools.settle()
    assert await live(store) == {"mine": RequestState.DISPATCHED}
    first.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, other)


async def test_a_refusal_tells_the_id_that_the_request_is_explained_by(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", max_queued_requests=0),))
    first = await runtime.intake.place(tools.request(LONG, request_id="mine"))

    with pytest.raises(QueueFullError) as refused:
        await runtime.intake.place(tools.request(f"2 {LONG}", request_id="mine"))

    second_id = refused.value.request_id
    assert second_id is not None and second_id.startswith("mine-")
    assert runtime.context.decisions.get(second_id) is not None
    first.finish(Outcome.COMPLETED)
