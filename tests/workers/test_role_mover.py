from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.scaling.role_plan import HOLDS_MS, PAUSE_MS
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.legs import Leg
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.role_mover import RoleMover
from tests.statestore.samples import placement
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance


@pytest.fixture
async def starving(pool: PoolStore, add_instance: AddInstance) -> None:
    """Two prefill instances with more queued than they serve within the SLO, and two idle decode instances."""
    for number in range(2):
        await add_instance(f"p{number}", role=Role.PREFILL, prefill_tokens_per_s=100.0)
        await add_instance(f"d{number}", role=Role.DECODE)
        await pool.place(placement(f"r{number}", f"p{number}", tokens=5000, leg=Leg.PREFILL))


async def roles(pool: Any) -> list[str]:
    return [spec.role.value for _, spec in sorted((await pool.membership()).instances.items())]


async def test_the_leader_gives_a_starving_side_an_instance_of_the_other(
    pool: PoolStore, clock: ManualClock, starving: None, value: Callable[..., float], leading: LeaderContext
) -> None:
    mover = RoleMover(leading, SchedulingSettings())
    for _ in range((PAUSE_MS + HOLDS_MS) // 1000 + 1):
        await mover.tick()
        clock.jump(1.0)

    assert (await roles(pool)).count("prefill") == 3
    assert value("dualmap_worker_role_changes_total", role="prefill") == 1


async def test_a_deposed_leader_changes_no_role(
    pool: PoolStore, clock: ManualClock, starving: None, leading: LeaderContext
) -> None:
    mover = RoleMover(replace(leading, fence=leading.fence - 1), SchedulingSettings())

    with pytest.raises(LeaseLostError):
        for _ in range((PAUSE_MS + HOLDS_MS) // 1000 + 1):
            await mover.tick()
            clock.jump(1.0)

    assert (await roles(pool)).count("prefill") == 2
