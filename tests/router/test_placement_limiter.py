"""The limiter of placements: one at a time, in order, with a wait that ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.placement_limiter import PlacementLimiter

MAX_WAIT_S = 1.0
TOGETHER, LONG, SHORT = 1_000, 900, 400


@pytest.fixture
def limiter(clock: Any) -> PlacementLimiter:
    return PlacementLimiter(clock, clock.call_later, together_tokens=TOGETHER)


async def waits(limiter: PlacementLimiter, tools: Any) -> asyncio.Task[bool]:
    task = asyncio.create_task(limiter.acquire(LONG, MAX_WAIT_S))
    await tools.settle()
    assert not task.done()
    return task


def test_a_free_slot_is_taken_once(limiter: PlacementLimiter) -> None:
    assert limiter.try_acquire(LONG)
    assert not limiter.try_acquire(LONG)


async def test_slots_are_passed_on_in_the_order_of_arrival_and_free_in_the_end(
    limiter: PlacementLimiter, tools: Any
) -> None:
    limiter.try_acquire(LONG)
    first, second = await waits(limiter, tools), await waits(limiter, tools)

    limiter.release(LONG)
    assert await first
    assert not second.done()
    limiter.release(LONG)
    assert await second
    limiter.release(LONG)

    assert limiter.try_acquire(LONG)


async def test_who_has_waited_long_goes_without_and_is_not_given_the_slot_later(
    limiter: PlacementLimiter, clock: Any, tools: Any
) -> None:
    limiter.try_acquire(LONG)
    impatient = await waits(limiter, tools)

    await clock.advance(MAX_WAIT_S)

    assert await impatient is False
    limiter.release(LONG)
    assert limiter.try_acquire(LONG)


async def test_nobody_joins_a_line_that_is_longer_than_it_may_wait(
    limiter: PlacementLimiter, clock: Any, tools: Any
) -> None:
    limiter.try_acquire(LONG)
    for _ in range(30):
        follower = await waits(limiter, tools)
        await clock.advance(0.3)  # what a slot usually takes
        limiter.release(LONG)
        assert await follower

    line = [await waits(limiter, tools) for _ in range(3)]

    assert await limiter.acquire(LONG, MAX_WAIT_S) is False
    for waiting in line:
        limiter.release(LONG)
        assert await waiting


async def test_short_prompts_look_together_but_overtake_nobody(limiter: PlacementLimiter, tools: Any) -> None:
    assert limiter.try_acquire(SHORT)
    assert limiter.try_acquire(SHORT)
    long = await waits(limiter, tools)
    assert not limiter.try_acquire(100)

    limiter.release(SHORT)
    await tools.settle()
    assert not long.done()
    limiter.release(SHORT)

    assert await long


@pytest.mark.parametrize("given", [False, True], ids=["while it waited", "just after it was given the slot"])
async def test_a_cancelled_wait_keeps_no_slot(given: bool, limiter: PlacementLimiter, tools: Any) -> None:
    limiter.try_acquire(LONG)
    cancelled, next_one = await waits(limiter, tools), await waits(limiter, tools)

    if given:
        limiter.release(LONG)
        cancelled.cancel()
    else:
        cancelled.cancel()
        await tools.settle()
        limiter.release(LONG)

    assert await next_one
    with pytest.raises(asyncio.CancelledError):
        await cancelled
