"""Turns: one at a time, in order, with patience that ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.turns import Turns

PATIENCE_S = 1.0
TOGETHER, LONG, SHORT = 1_000, 900, 400


@pytest.fixture
def turns(clock: Any) -> Turns:
    return Turns(clock, clock.call_later, together_tokens=TOGETHER)


async def waits(turns: Turns, tools: Any) -> asyncio.Task[bool]:
    task = asyncio.create_task(turns.wait(LONG, PATIENCE_S))
    await tools.settle()
    assert not task.done()
    return task


def test_a_free_turn_is_taken_once(turns: Turns) -> None:
    assert turns.take(LONG)
    assert not turns.take(LONG)


async def test_turns_are_passed_on_in_the_order_of_arrival_and_free_in_the_end(turns: Turns, tools: Any) -> None:
    turns.take(LONG)
    first, second = await waits(turns, tools), await waits(turns, tools)

    turns.pass_on(LONG)
    assert await first
    assert not second.done()
    turns.pass_on(LONG)
    assert await second
    turns.pass_on(LONG)

    assert turns.take(LONG)


async def test_who_has_waited_long_goes_without_and_is_not_given_the_turn_later(
    turns: Turns, clock: Any, tools: Any
) -> None:
    turns.take(LONG)
    impatient = await waits(turns, tools)

    await clock.advance(PATIENCE_S)

    assert await impatient is False
    turns.pass_on(LONG)
    assert turns.take(LONG)


async def test_nobody_joins_a_line_that_is_longer_than_its_patience(turns: Turns, clock: Any, tools: Any) -> None:
    turns.take(LONG)
    for _ in range(30):
        follower = await waits(turns, tools)
        await clock.advance(0.3)  # what a turn usually takes
        turns.pass_on(LONG)
        assert await follower

    line = [await waits(turns, tools) for _ in range(3)]

    assert await turns.wait(LONG, PATIENCE_S) is False
    for waiting in line:
        turns.pass_on(LONG)
        assert await waiting


async def test_short_prompts_look_together_but_overtake_nobody(turns: Turns, tools: Any) -> None:
    assert turns.take(SHORT)
    assert turns.take(SHORT)
    long = await waits(turns, tools)
    assert not turns.take(100)

    turns.pass_on(SHORT)
    await tools.settle()
    assert not long.done()
    turns.pass_on(SHORT)

    assert await long


@pytest.mark.parametrize("given", [False, True], ids=["while it waited", "just after it was given the turn"])
async def test_a_cancelled_wait_keeps_no_turn(given: bool, turns: Turns, tools: Any) -> None:
    turns.take(LONG)
    cancelled, next_one = await waits(turns, tools), await waits(turns, tools)

    if given:
        turns.pass_on(LONG)
        cancelled.cancel()
    else:
        cancelled.cancel()
        await tools.settle()
        turns.pass_on(LONG)

    assert await next_one
    with pytest.raises(asyncio.CancelledError):
        await cancelled
