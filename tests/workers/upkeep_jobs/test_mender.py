"""The mender repairs and counts entries of the store that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.changes import Change
from dualmap.workers.context import LeaderContext
from dualmap.workers.upkeep_jobs import Mender
from tests.workers.doing import AddInstance


async def test_unreadable_state_is_mended_and_counted_once(
    pool: PoolStore, add_instance: AddInstance, value: Callable[..., float], leading: LeaderContext
) -> None:
    await add_instance("a")
    await pool._make(Change([("HSET", pool._keys.names, "adapter", b"\xff")]))
    mender = Mender(leading)

    await mender.tick()
    await mender.tick()

    assert (await pool.membership()).names == {}
    assert value("dualmap_worker_mended_total") == 1
