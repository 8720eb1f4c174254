"""Nobody who stepped behind waits past the bound, even on an instance where nothing happens."""

from __future__ import annotations

import pytest

from scheduling.settings import SchedulingSettings
from statestore.base import RequestState
from statestore.errors import LeaseLostError
from workers.overdue import OverdueGranter


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(queue_order="deadline", max_hold_s=10.0)


@pytest.fixture
async def granter(pool, fence, metrics, add_instance, reserve):
    """For instance a, which is full and finishes nothing, with a request held."""
    await add_instance("a", dispatch_window_tokens=1)
    await reserve("running", "a")
    await reserve("held", "a")
    return OverdueGranter(pool, fence, interval_s=1.0, metrics=metrics)


async def test_a_request_held_to_the_bound_is_granted_without_room(pool, granter, clock, value) -> None:
    clock.jump(9.0)
    await granter.tick()
    assert (await pool.records(["held"]))["held"].state is RequestState.HELD

    clock.jump(1.0)
    await granter.tick()
    assert (await pool.records(["held"]))["held"].state is RequestState.DISPATCHED
    assert value("dualmap_worker_overdue_granted_total") == 1


async def test_a_deposed_leader_grants_nothing(pool, granter, clock) -> None:
    clock.jump(20_000.0)

    with pytest.raises(LeaseLostError):
        await granter.tick()

    assert (await pool.records(["held"]))["held"].state is RequestState.HELD
