"""Many calls for many items: in their order, a bounded number at once."""

from __future__ import annotations

import asyncio

import pytest

from statestore.batches import for_each
from statestore.errors import StoreUnavailableError


async def test_calls_start_in_order_and_only_so_many_are_in_flight() -> None:
    started: list[int] = []
    in_flight, most = 0, 0

    async def call(item: int) -> None:
        nonlocal in_flight, most
        started.append(item)
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1

    await for_each(range(1000), call)

    assert started == list(range(1000))
    assert most == 256


async def test_what_a_call_met_is_raised_and_no_further_batch_begins() -> None:
    started: list[int] = []

    async def fails(item: int) -> None:
        started.append(item)
        raise StoreUnavailableError("away")

    with pytest.raises(StoreUnavailableError):
        await for_each(range(1000), fails)

    assert len(started) == 256
