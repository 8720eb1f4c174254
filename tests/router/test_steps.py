"""Work in steps on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import pytest

from dualmap.router.steps import in_steps


async def test_others_run_between_two_steps_and_the_result_is_the_works() -> None:
    order: list[str] = []

    def work() -> Generator[None, None, str]:
        for step in range(3):
            order.append(f"step {step}")
            yield
        return "done"

    async def other() -> None:
        for turn in range(3):
            order.append(f"turn {turn}")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    assert await in_steps(work()) == "done"
    await beside
    assert order == ["step 0", "turn 0", "step 1", "turn 1", "step 2", "turn 2"]


async def test_an_error_of_the_work_is_raised() -> None:
    def work() -> Generator[None, None, None]:
        yield
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await in_steps(work())


async def test_work_that_is_cancelled_is_closed_at_once() -> None:
    closed = asyncio.Event()

    def work() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.set()

    task = asyncio.create_task(in_steps(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and closed.is_set()
