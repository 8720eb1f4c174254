"""Transitions on their way to the store."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from router.outbox import Outbox
from statestore.errors import StoreError, StoreUnavailableError


def delivering(outbox: Outbox) -> asyncio.Task[None]:
    return asyncio.create_task(outbox.run())


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def note(into: list[int], number: int) -> Callable[[], Awaitable[None]]:
    async def transition() -> None:
        into.append(number)

    return transition


async def test_calls_start_in_the_order_in_which_they_were_posted(clock: Any) -> None:
    outbox, seen = Outbox(limit=100, clock=clock, concurrency=8), []
    task = delivering(outbox)

    for number in range(50):
        outbox.post(note(seen, number))

    assert await outbox.flush(5.0)
    assert seen == list(range(50))
    await stopped(task)


async def test_one_that_finds_the_store_away_is_repeated_until_it_gets_through(clock: Any, tools: Any) -> None:
    outbox, tries = Outbox(limit=10, clock=clock, concurrency=1), []

    async def comes_back_after_three() -> None:
        tries.append(clock.now_s)
        if len(tries) <= 3:
            raise StoreUnavailableError("away")

    task = delivering(outbox)
    outbox.post(comes_back_after_three)
    await clock.advance(10.0)

    assert len(tries) == 4
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1]
    assert await outbox.flush(1.0)
    await stopped(task)


async def test_one_that_is_refused_does_not_stop_the_others(clock: Any) -> None:
    outbox, seen = Outbox(limit=10, clock=clock, concurrency=1), []

    async def refused() -> None:
        raise StoreError("never")

    async def broken() -> None:
        raise ValueError("a bug")

    task = delivering(outbox)
    for transition in (refused, broken, note(seen, 1)):
        outbox.post(transition)

    assert await outbox.flush(5.0)
    assert seen == [1]
    await stopped(task)


async def test_a_full_outbox_drops_and_counts_and_never_waits(clock: Any) -> None:
    outbox = Outbox(limit=2, clock=clock)

    for number in range(5):
        outbox.post(note([], number))

    assert (len(outbox), outbox.dropped.value) == (2, 3)


async def test_flushing_gives_up_in_time(clock: Any) -> None:
    outbox = Outbox(limit=2, clock=clock)
    outbox.post(note([], 1))  # no courier runs

    assert not await outbox.flush(0.01)


async def test_couriers_that_were_stopped_leave_the_next_ones_work(clock: Any) -> None:
    outbox, seen = Outbox(limit=10, clock=clock, concurrency=4), []
    former = delivering(outbox)
    await asyncio.sleep(0)  # all of them wait for work
    await stopped(former)

    task = delivering(outbox)
    await asyncio.sleep(0)
    outbox.post(note(seen, 1))

    assert await outbox.flush(5.0)
    assert seen == [1]
    await stopped(task)


async def test_whoever_posts_is_told_once_when_it_was_delivered_refused_or_dropped(clock: Any) -> None:
    outbox, told = Outbox(limit=2, clock=clock, concurrency=1), []

    async def refused() -> None:
        told.append("tried")
        raise StoreError("no")

    async def delivered() -> None:
        told.append("tried")

    for name, transition in (("refused", refused), ("delivered", delivered), ("dropped", delivered)):
        outbox.post(transition, lambda name=name: told.append(name))
    task = delivering(outbox)

    assert await outbox.flush(5.0)
    assert told == ["dropped", "tried", "refused", "tried", "delivered"]
    await stopped(task)
