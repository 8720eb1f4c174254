"""Idle instances take what other queues would make late: by the leader, and only what its plans may move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.queue_jobs import IdleFiller
from tests.workers.doing import AddInstance, Reserve


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(queue_order="deadline")


@pytest.fixture
def filler(leading: LeaderContext, scheduling: SchedulingSettings) -> IdleFiller:
    return IdleFiller(leading, scheduling)


@pytest.fixture
async def busy(add_instance: AddInstance, reserve: Reserve) -> None:
    """Instance a with 8 s of work under an SLO of 5 s, all but the first request held."""
    await add_instance("a", prefill_tokens_per_s=1000.0, dispatch_window_tokens=2000)
    for number in range(4):
        await reserve(f"r{number}", "a", 2000)


async def test_an_instance_that_joined_takes_what_would_be_late_and_is_sent_it(
    pool: PoolStore, filler: IdleFiller, busy: Any, add_instance: AddInstance, value: Callable[..., float]
) -> None:
    await add_instance("b", prefill_tokens_per_s=1000.0, dispatch_window_tokens=2000)

    await filler.tick()

    requests = {request.request_id: request for request in (await pool.snapshot()).requests}
    moved = [request for request in requests.values() if request.instance_id == "b"]
    assert [request.state for request in moved] == [RequestState.DISPATCHED]
    assert value("dualmap_worker_migrations_total", reason="idle", status="migrated") == 1
    assert (await pool.snapshot()).migrations == {"idle": 1}


@pytest.mark.parametrize("figures", [{"role": Role.PREFILL}, {"prefill_tokens_per_s": 100.0}])
async def test_nothing_goes_where_it_is_not_served_or_late_as_well(
    pool: PoolStore, filler: IdleFiller, busy: Any, add_instance: AddInstance, figures: Any
) -> None:
    await add_instance("b", **figures)

    await filler.tick()

    assert {request.instance_id for request in (await pool.snapshot()).requests} == {"a"}


async def test_a_deposed_leader_moves_nothing(
    pool: PoolStore, filler: IdleFiller, busy: Any, add_instance: AddInstance
) -> None:
    await add_instance("b", prefill_tokens_per_s=1000.0, dispatch_window_tokens=2000)
    await pool.leader_lease.release((await pool.snapshot()).leader)
    assert await pool.leader_lease.acquire("another", 10_000) is not None

    with pytest.raises(LeaseLostError):
        await filler.tick()
