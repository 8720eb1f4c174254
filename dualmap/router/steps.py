"""Long work on the event loop, in steps: between two of them the loop serves other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_steps(work: Generator[None, None, T]) -> T:
    """Run the work, which yields where it may pause; returns its result, and raises its errors."""
    try:
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            await asyncio.sleep(0)
    finally:
        work.close()


def without_pause(work: Generator[None, None, T]) -> T:
    """Run work that is known to be short without a pause."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
