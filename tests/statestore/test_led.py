"""A leader's view of its pool: what takes a fence gets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.led import LedPool
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore

HELD = StoredRequest(
    "r",
    "replica",
    "a",
    RequestState.HELD,
    1,
    uncached_tokens=10,
    prompt_tokens=10,
    expected_output_tokens=10,
    slo_ms=5000,
)


@pytest.fixture
async def pool() -> PoolStore:
    pool = MemoryStore(SchedulingSettings(), now_ms=lambda: 1000).pool("default")
    await pool.members.put_instance(InstanceSpec("a", "http://a", state=InstanceState.READY))
    return pool


async def fence_of(pool: PoolStore) -> int:
    lease = await pool.leader_lease.acquire("worker", 5000)
    assert lease is not None
    return lease.fence


async def test_a_leader_writes_and_reads(pool: PoolStore) -> None:
    led = LedPool(pool, await fence_of(pool))

    assert await led.set_instance_state("a", InstanceState.DRAINING, expected=InstanceState.READY)
    queue = await led.queue_head("a")
    assert queue is not None
    assert queue.load.state is InstanceState.DRAINING
    assert await led.arrivals("0", 10) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda led: led.publish_tree(HotnessTree(), {}),
        lambda led: led.publish_learned(Learned(), {}),
        lambda led: led.set_instance_state("a", InstanceState.DOWN),
        lambda led: led.record_scaling(ScaleRecord(), ScaleEntry(0, 0, "", "")),
        lambda led: led.migrate(HELD, "b", reason="test"),
    ],
)
async def test_a_deposed_leader_changes_nothing(pool: PoolStore, write: Callable[[LedPool], Awaitable[object]]) -> None:
    led = LedPool(pool, await fence_of(pool) - 1)

    with pytest.raises(LeaseLostError):
        await write(led)

    assert (await pool.membership()).instances["a"].state is InstanceState.READY
