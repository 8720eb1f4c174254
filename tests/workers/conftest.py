"""A pool in memory with instances and reservations, on a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext, PoolContext
from dualmap.workers.metrics import WorkerMetrics
from tests.support.manual_clock import ManualClock
from tests.support.placements import placement
from tests.workers.contexts import context_of
from tests.workers.doing import AddInstance, Reserve
from tests.workers.flaky_pool import FlakyPool
from tests.workers.scripted_server import ScriptedServer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics()


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap")


@pytest.fixture
async def store(clock: ManualClock, scheduling: SchedulingSettings) -> AsyncIterator[MemoryStore]:
    memory = MemoryStore(scheduling, now_ms=clock.now_ms)
    yield memory
    await memory.close()


@pytest.fixture
def pool(store: MemoryStore) -> PoolStore:
    return store.pool("default")


@pytest.fixture
def context(pool: PoolStore, clock: ManualClock, metrics: WorkerMetrics) -> PoolContext:
    return context_of(pool, clock=clock, metrics=metrics)


@pytest.fixture
def leading(context: PoolContext, fence: int) -> LeaderContext:
    """The context of a leader that reads the pool itself, always fresh."""
    return context.leading(fence, context.pool)


@pytest.fixture
def flaky(pool: PoolStore) -> FlakyPool:
    return FlakyPool(pool)


@pytest.fixture
def add_instance(pool: PoolStore) -> AddInstance:
    """Enter an instance (ready unless told otherwise): ``await add_instance("a", dispatch_window_tokens=1000)``."""

    async def add(instance_id: str, state: InstanceState = InstanceState.READY, **figures: Any) -> None:
        url = figures.pop("url", f"http://{instance_id}")
        await pool.members.put_instance(InstanceSpec(instance_id, url, **figures))
        await pool.members.set_instance_state(instance_id, state)

    return add


@pytest.fixture
def order(scheduling: SchedulingSettings) -> QueueOrder:
    return queue_order_of(scheduling)


@pytest.fixture
def reserve(pool: PoolStore, order: QueueOrder) -> Reserve:
    """Reserve ``tokens`` on an instance: ``await reserve("r1", "a", 5000, other="b")``."""

    async def ask(request_id: str, instance_id: str, tokens: int = 1000, **fields: Any) -> PlaceStatus:
        fields = {"replica_id": "router-1", "slo_ms": 5000, **fields}
        fields["rank_ms"] = order.rank_ms(fields["slo_ms"])
        reply = await pool.place(placement(request_id, instance_id, tokens, **fields))
        return reply.status

    return ask


@pytest.fixture
async def fence(pool: PoolStore) -> int:
    """The fencing number of a leadership that outlasts the test."""
    lease = await pool.leader_lease.acquire("the-leader", 10_000_000)
    assert lease is not None
    return lease.fence


@pytest.fixture
def value(metrics: WorkerMetrics) -> Callable[..., float]:
    """A sample of the worker's metrics: ``value("dualmap_worker_leader", pool="default")``; 0 if not there."""

    def read(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, {"pool": "default", **labels}) or 0.0

    return read


@pytest.fixture
async def servers() -> AsyncIterator[Callable[[], Awaitable[ScriptedServer]]]:
    """Start scripted servers: ``server = await servers()``; stopped after the test."""
    started: list[ScriptedServer] = []

    async def start() -> ScriptedServer:
        server = ScriptedServer()
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """Poll a condition to its deadline and give its value: ``await eventually(lambda: worker.lease)``."""

    async def poll(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            assert asyncio.get_running_loop().time() < deadline_s, "the condition never came true"
            await asyncio.sleep(0.01)

    return poll
