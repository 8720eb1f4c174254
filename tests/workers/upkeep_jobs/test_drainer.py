"""A draining instance is parked when it is empty, not before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.upkeep_jobs import Drainer
from tests.statestore.samples import finish
from tests.workers.doing import AddInstance, Reserve


async def test_a_draining_instance_is_done_when_its_last_request_is(
    pool: PoolStore,
    add_instance: AddInstance,
    reserve: Reserve,
    value: Callable[..., float],
    caplog: pytest.LogCaptureFixture,
    leading: LeaderContext,
) -> None:
    caplog.set_level(logging.INFO)
    await add_instance("a")
    await add_instance("b")
    await reserve("r1", "a")
    await pool.members.set_instance_state("a", InstanceState.DRAINING)
    drainer = Drainer(leading)

    await drainer.tick()
    assert value("dualmap_worker_drained_total") == 0

    await finish(pool, "r1")
    await drainer.tick()
    await drainer.tick()

    assert value("dualmap_worker_drained_total") == 1
    assert caplog.text.count("instance drained") == 1
    assert (await pool.membership()).instances["a"].state is InstanceState.STANDBY


async def test_an_instance_that_is_resumed_meanwhile_stays_in_service(
    pool: PoolStore, add_instance: AddInstance, leading: LeaderContext
) -> None:
    await add_instance("a", InstanceState.DRAINING)
    empty = await pool.loads()
    await pool.members.set_instance_state("a", InstanceState.READY)

    async def loads_of_a_moment_ago() -> Any:
        return empty

    pool.loads = loads_of_a_moment_ago
    await Drainer(leading).tick()

    assert (await pool.membership()).instances["a"].state is InstanceState.READY
