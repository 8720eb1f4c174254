"""Turns: one at a time, in order, with patience that ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.turns import Turns


async def waits(turns: Turns, tools: Any) -> asyncio.Task[bool]:
    task = asyncio.create_task(turns.wait())
    await tools.settle()
    assert not task.done()
    return task


def test_a_free_turn_is_taken_once(clock: Any) -> None:
    turns = Turns(clock.call_later)

    assert turns.take()
    assert not turns.take()


async def test_turns_are_passed_on_in_the_order_of_arrival_and_free_in_the_end(clock: Any, tools: Any) -> None:
    turns = Turns(clock.call_later)
    turns.take()
    first, second = await waits(turns, tools), await waits(turns, tools)

    turns.pass_on()
    assert await first
    assert not second.done()
    turns.pass_on()
    assert await second
    turns.pass_on()

    assert turns.take()


async def test_who_has_waited_long_goes_without_and_is_not_given_the_turn_later(clock: Any, tools: Any) -> None:
    turns = Turns(clock.call_later, patience_s=1.0)
    turns.take()
    impatient = await waits(turns, tools)

    await clock.advance(1.0)

    assert await impatient is False
    turns.pass_on()
    assert turns.take()


@pytest.mark.parametrize("given", [False, True], ids=["while it waited", "just after it was given the turn"])
async def test_a_cancelled_wait_keeps_no_turn(given: bool, clock: Any, tools: Any) -> None:
    turns = Turns(clock.call_later)
    turns.take()
    cancelled, next_one = await waits(turns, tools), await waits(turns, tools)

    if given:
        turns.pass_on()
        cancelled.cancel()
    else:
        cancelled.cancel()
        await tools.settle()
        turns.pass_on()

    assert await next_one
    with pytest.raises(asyncio.CancelledError):
        await cancelled
