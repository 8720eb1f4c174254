"""Many calls for many items, a bounded number in flight at once, so that they do not starve everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

_BATCH = 256

T = TypeVar("T")


async def for_each(items: Iterable[T], call: Callable[[T], Awaitable[object]]) -> None:
    """One call per item, started in their order; raises the error of the first one that failed."""
    for batch in batches(items):
        await asyncio.gather(*(call(item) for item in batch))


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch
