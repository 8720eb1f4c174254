"""Steps: what a search or a plan asks its driver to do.

A decision over several steps is a generator: it yields a step, is sent the answer, and returns its result. It does no
I/O and never waits, so the same search is driven with awaits by a router, in virtual time by the simulator, and by hand
in a test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

R = TypeVar("R")

Step = Callable[[Any], Any]
"""Takes the driver's fleet, calls one method of it, and returns the result: an answer, or an awaitable of one."""
Steps = Generator[Step, Any, R]


def drive_now(steps: Steps[R], fleet: object) -> R:
    """Carry the steps out on a fleet that answers at once."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step(fleet))
    except StopIteration as done:
        result: R = done.value
        return result


async def drive(steps: Steps[R], fleet: object) -> R:
    """Carry the steps out on a fleet whose answers are awaited; its errors are raised in the search."""
    try:
        step = next(steps)
        while True:
            answer: Awaitable[Any] = step(fleet)
            try:
                told = await answer
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(told)
    except StopIteration as done:
        result: R = done.value
        return result
