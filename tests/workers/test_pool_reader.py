"""Jobs that look at the same moment share one read."""

from __future__ import annotations

import asyncio

import pytest

from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.pool import PoolStore
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


async def test_members_that_are_known_to_have_changed_are_read_again(pool: PoolStore, clock: ManualClock) -> None:
    reader = CachedPoolReader(pool, clock, 60.0)
    assert (await reader.membership()).instances == {}
    await pool.members.put_instance(InstanceSpec("a", "http://a:1"))
    assert (await reader.membership()).instances == {}

    reader.forget_membership()
    assert (await reader.membership()).instances.keys() == {"a"}
