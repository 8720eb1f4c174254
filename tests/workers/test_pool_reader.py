"""Jobs that look at the same moment share one read."""

from __future__ import annotations

import asyncio

import pytest

from dualmap.statestore.errors import StoreUnavailableError
from dualmap.workers.pool_reader import CachedPoolReader
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance
from tests.workers.flaky_pool import FlakyPool


async def test_looks_within_the_bound_share_one_read_and_later_ones_see_what_changed(
    clock: ManualClock, flaky: FlakyPool, add_instance: AddInstance
) -> None:
    reader = CachedPoolReader(flaky, clock, 0.4)
    await add_instance("a")

    await asyncio.gather(*(reader.loads() for _ in range(5)), *(reader.membership() for _ in range(5)))
    assert sorted(flaky.calls) == ["loads", "membership"]

    await add_instance("b")
    clock.jump(0.5)
    assert set(await reader.loads()) == set((await reader.membership()).instances) == {"a", "b"}


async def test_an_outage_is_told_to_everybody_and_the_next_look_tries_again(
    clock: ManualClock, flaky: FlakyPool, add_instance: AddInstance
) -> None:
    reader = CachedPoolReader(flaky, clock, 0.4)
    await add_instance("a")
    await reader.loads()
    clock.jump(1.0)

    flaky.away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await reader.loads()

    flaky.away = False
    assert set(await reader.loads()) == {"a"}
