"""Sums that drifted are put right and counted."""

from __future__ import annotations

from collections.abc import Callable

from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.upkeep_jobs import Repairer
from tests.statestore.samples import drift
from tests.workers.doing import AddInstance, Reserve


async def test_drift_is_repaired_and_counted_once(
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    value: Callable[..., float],
    leading: LeaderContext,
) -> None:
    await add_instance("a")
    await reserve("r1", "a", 1200)
    await drift(pool, "a", "pending_tokens", 777)
    repairer = Repairer(leading)

    await repairer.tick()
    await repairer.tick()

    assert (await pool.loads())["a"].pending_tokens == 1200
    assert value("dualmap_worker_drift_repaired_total") == 1


async def test_sums_that_are_right_stay(
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    value: Callable[..., float],
    leading: LeaderContext,
) -> None:
    await add_instance("a")
    await reserve("r1", "a", 1200)

    await Repairer(leading).tick()

    assert value("dualmap_worker_drift_repaired_total") == 0
