"""A leader's view of its pool: what takes a fence gets it."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.errors import LeaseLostError
from statestore.led import LedPool
from statestore.memory import AtOnce, MemoryStore


@pytest.fixture
def pool() -> AtOnce:
    pool = AtOnce(MemoryStore(SchedulingSettings(), now_ms=lambda: 1000).pool("default"))
    pool.put_instance(InstanceSpec("a", "http://a", state=InstanceState.READY))
    return pool


def test_a_leader_writes_and_reads(pool: AtOnce) -> None:
    lease = pool.acquire_lease("worker", 5000)
    led = LedPool(pool, lease.fence)

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
def test_a_deposed_leader_changes_nothing(pool: AtOnce, call: str, arguments: tuple[Any, ...]) -> None:
    lease = pool.acquire_lease("worker", 5000)
    led = LedPool(pool, lease.fence - 1)

    with pytest.raises(LeaseLostError):
        getattr(led, call)(*arguments)

    assert pool.membership().instances["a"].state is InstanceState.READY
