"""Discovery as a worker runs it: a real Valkey, an API server and pods behind sockets, and a change of leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dualmap.runtime.clock import RealClock
from dualmap.runtime.discovery_settings import DiscoverySettings, KubernetesSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.ops import serve_ops
from dualmap.workers.pool_worker import PoolWorker
from dualmap.workers.settings import WorkerSettings
from tests.support.kubernetes_cluster import PODS, Cluster, asgi
from tests.workers.contexts import context_of
from tests.workers.scripted_server import ScriptedServer

QUICK = WorkerSettings(lease_s=30.0, health_interval_s=0.05, health_timeout_s=30.0)


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Cluster, str]]:
    made = Cluster(RealClock())
    async with serve_ops(asgi(made), "127.0.0.1", 0) as port:
        yield made, f"http://127.0.0.1:{port}"
        made.close()


async def test_pods_come_and_go_through_a_change_of_leader(
    cluster: tuple[Cluster, str],
    valkey_url: str,
    servers: Callable[[], Awaitable[ScriptedServer]],
    eventually: Callable[..., Awaitable[Any]],
) -> None:
    api, url = cluster
    ports = [(await servers()).url.rpartition(":")[2] for _ in range(3)]

    def put_pod(number: int, **how: Any) -> None:
        api.put_pod(f"vllm-{number}", ip="127.0.0.1", annotations={"dualmap/port": ports[number]}, **how)

    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SchedulingSettings())
    pool = store.pool("default")
    kubernetes = KubernetesSettings(label_selector="app=vllm", namespace="default", api_url=url)
    settings = PoolSettings(discovery=DiscoverySettings(kubernetes=kubernetes))

    def start(name: str) -> asyncio.Task[None]:
        worker = PoolWorker(context_of(pool, settings=settings, worker=QUICK, time_scale=20.0, worker_id=name), store)
        return asyncio.create_task(worker.run())

    async def states() -> dict[str, str]:
        return {name: spec.state.value for name, spec in (await pool.membership()).instances.items()}

    async def becomes(wanted: dict[str, str]) -> None:
        async def are() -> bool:
            return await states() == wanted

        await eventually(are)

    put_pod(0)
    put_pod(1, ready=False)
    first = start("w1")
    try:
        await becomes({"vllm-0": "ready"})
        put_pod(1)
        await becomes({"vllm-0": "ready", "vllm-1": "ready"})
        put_pod(0, terminating=True)
        await becomes({"vllm-1": "ready"})
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    api.delete(PODS, "vllm-1")  # while nobody watches
    put_pod(2)
    second = start("w2")
    try:
        await becomes({"vllm-2": "ready"})
        assert (await pool.publications.discovery()).by == "w2"
        assert (await pool.publications.discovery()).state == "watching"
    finally:
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await store.close()
