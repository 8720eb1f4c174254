"""Replicas over an in-memory store, on a clock that a test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from dualmap.router.replica.runtime import Runtime
from dualmap.router.serving.app import create_app
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.statestore.memory import MemoryStore
from tests.support.manual_clock import ManualClock, settle


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap", block_tokens=16)


@pytest.fixture
def store(clock: ManualClock, scheduling: SchedulingSettings) -> MemoryStore:
    return MemoryStore(scheduling, now_ms=clock.now_ms)


StartRuntime = Callable[..., Awaitable[Runtime]]


@pytest.fixture
async def start_runtime(
    clock: ManualClock, scheduling: SchedulingSettings, store: MemoryStore
) -> AsyncIterator[StartRuntime]:
    """Starts replicas over the one store; all stopped in the end. ``through`` wraps the store that a replica
    sees; other keywords are router settings."""
    started: list[Runtime] = []

    async def start(
        *,
        instances: tuple[InstanceSpec, ...] = (),
        pools: tuple[PoolSettings, ...] = (PoolSettings(),),
        through: Callable[[MemoryStore], Any] = lambda store: store,
        pairs_legs: bool = False,
        tenants: Sequence[TenantSettings] = (),
        **settings: Any,
    ) -> Runtime:
        for pool in pools:
            for instance in instances:
                await store.pool(pool.name).members.put_instance(instance)
        settings.setdefault("replica_id", f"replica-{len(started) + 1}")
        runtime = Runtime(
            RouterSettings(**settings), scheduling, through(store), pools,
            clock=clock, call_later=clock.call_later, now_ms=clock.now_ms, pairs_legs=pairs_legs, tenants=tenants,
        )  # fmt: skip
        await runtime.start()
        await settle()
        started.append(runtime)
        return runtime

    yield start
    for runtime in started:
        await runtime.stop()


@pytest.fixture
async def client_of() -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """HTTP clients of replicas' operation sides, without a socket."""
    clients: list[httpx.AsyncClient] = []

    def client(runtime: Runtime, **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(create_app(runtime), raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://replica", **options))
        return clients[-1]

    yield client
    for each in clients:
        await each.aclose()
