"""Requests that wait for the first instance of a pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.pool.instance_waiters import LOOK_S, InstanceWaiters
from dualmap.router.pool.view import ViewKeeper
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools


class Waits:
    """Waiters of an empty pool, with their watch running."""

    def __init__(self, store: Any, clock: Any) -> None:
        self.pool, self.clock = store.pool("default"), clock
        keeper = ViewKeeper(self.pool, clock=clock)
        self.waiters = InstanceWaiters(keeper, clock=clock, call_later=clock.call_later)
        self.firsts = 0
        self.waiters.on_first = self._first
        self.watching = asyncio.create_task(self.waiters.watch())

    def _first(self) -> None:
        self.firsts += 1

    def wait(self, within_s: float = 60.0) -> asyncio.Task[bool]:
        return asyncio.create_task(self.waiters.wait(within_s))

    async def add(self) -> None:
        await self.pool.members.put_instance(tools.spec("a"))
        await self.pool.members.set_instance_state("a", InstanceState.READY)


@pytest.fixture
async def waits(store: Any, clock: Any) -> Any:
    made = Waits(store, clock)
    yield made
    made.watching.cancel()


async def test_all_that_wait_go_on_as_soon_as_an_instance_is_ready(waits: Waits) -> None:
    waiting = [waits.wait() for _ in range(3)]
    await waits.clock.advance(20.0)
    assert not any(task.done() for task in waiting)
    await waits.add()
    await waits.clock.advance(LOOK_S)

    assert [task.result() for task in waiting] == [True] * 3


async def test_the_first_one_alone_is_reported_each_time(waits: Waits) -> None:
    waiting = [waits.wait(), waits.wait()]
    await waits.clock.advance(1.0)
    assert waits.firsts == 1
    for task in waiting:
        task.cancel()
    await waits.clock.advance(1.0)
    waiting = [waits.wait()]
    await waits.clock.advance(1.0)
    assert waits.firsts == 2
    waiting[0].cancel()


async def test_a_wait_has_an_end(waits: Waits) -> None:
    waiting = waits.wait(5.0)
    await waits.clock.advance(5.0)
    assert waiting.result() is False


async def test_without_anybody_who_waits_nothing_is_read(waits: Waits) -> None:
    reads = 0
    membership = waits.pool.membership

    async def counted() -> Any:
        nonlocal reads
        reads += 1
        return await membership()

    waits.pool.membership = counted
    await waits.clock.advance(60.0)
    assert reads == 0
    waiting = waits.wait(1.0)
    await waits.clock.advance(10.0)
    assert waiting.done()
    assert 5 < reads < 20


async def test_a_store_that_is_away_ends_no_wait(waits: Waits) -> None:
    membership = waits.pool.membership

    async def away() -> Any:
        raise StoreUnavailableError("away")

    waits.pool.membership = away
    waiting = waits.wait()
    await waits.clock.advance(5.0)
    waits.pool.membership = membership
    await waits.add()
    await waits.clock.advance(LOOK_S)
    assert waiting.result() is True
