"""A leader's view of its pool: what takes a fence gets it."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.errors import LeaseLostError
from statestore.led import LedPool
from statestore.memory import PoolState


@pytest.fixture
def state() -> PoolState:
    state = PoolState(SchedulingSettings(), lambda: 1000)
    state.put_instance(InstanceSpec("a", "http://a", state=InstanceState.READY))
    return state


def test_a_leader_writes_and_reads(state: PoolState) -> None:
    lease = state.acquire_lease("worker", 5000)
    assert lease is not None
    led = LedPool(state, lease.fence)

    assert led.set_instance_state("a", InstanceState.DRAINING, expected=InstanceState.READY)
    assert led.queue_head("a").load.state is InstanceState.DRAINING
    assert led.arrivals("0", 10) == []


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("publish_tree", (HotnessTree(), {})),
        ("set_instance_state", ("a", InstanceState.DOWN)),
        ("update_instance", ("a", {})),
        ("reap", ("replica",)),
        ("repair", ()),
    ],
)
def test_a_deposed_leader_changes_nothing(state: PoolState, call: str, arguments: tuple[Any, ...]) -> None:
    lease = state.acquire_lease("worker", 5000)
    assert lease is not None
    led = LedPool(state, lease.fence - 1)

    with pytest.raises(LeaseLostError):
        getattr(led, call)(*arguments)

    assert state.instances["a"].spec.state is InstanceState.READY
