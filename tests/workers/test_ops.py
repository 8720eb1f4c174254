"""A worker's own port says whether it lives, whether it leads, and what it counted."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.ops import create_app, serve_ops
from dualmap.workers.pool_worker import PoolWorker
from dualmap.workers.serve import serve
from dualmap.workers.settings import WorkerSettings
from dualmap.workers.status import WorkerStatus
from tests.workers.contexts import context_of


async def test_health_and_metrics_of_a_running_worker(valkey_url: str) -> None:
    stop = asyncio.Event()
    ports: asyncio.Queue[int] = asyncio.Queue()
    running = asyncio.create_task(
        serve(
            WorkerSettings(ops_port=0),
            SchedulingSettings(),
            StoreSettings(url=valkey_url),
            [PoolSettings(name="one"), PoolSettings(name="two", model="other")],
            worker_id="w1",
            stop=stop,
            on_ops_port=ports.put_nowait,
        )
    )
    base = f"http://127.0.0.1:{await asyncio.wait_for(ports.get(), 60)}"
    async with httpx.AsyncClient(trust_env=False) as client:
        deadline_s = asyncio.get_running_loop().time() + 60
        while True:
            health = (await client.get(f"{base}/health")).json()
            if health["status"] == "ok" and all(pool["leader"] for pool in health["pools"].values()):
                break
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.01)
        metrics = (await client.get(f"{base}/metrics")).text
    stop.set()
    await asyncio.wait_for(running, 60)

    assert (health["status"], health["worker_id"], set(health["pools"])) == ("ok", "w1", {"one", "two"})
    assert 'dualmap_worker_leader{pool="one"} 1.0' in metrics
    assert 'dualmap_worker_leader{pool="two"} 1.0' in metrics
    assert 'dualmap_worker_drift_repaired_total{pool="two"} 0.0' in metrics
    assert "_created" not in metrics


async def test_health_stays_200_and_tells_how_the_last_call_to_the_store_went_without_a_call_of_its_own(
    clock: Any, flaky: Any, metrics: Any, store: Any
) -> None:
    settings = WorkerSettings(lease_s=3.0)
    worker = PoolWorker(context_of(flaky, worker=settings, clock=clock, metrics=metrics), store)
    running = asyncio.create_task(worker.run())
    app = create_app("w1", WorkerStatus([worker]), metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
        seen = []
        for flaky.away in (False, True, False):
            await clock.advance(2.0)
            calls = len(flaky.calls)
            answer, head = await client.get("/health"), await client.head("/health")
            assert len(flaky.calls) == calls, "a store that hangs must not hold up a probe"
            assert (answer.status_code, head.status_code, head.content) == (200, 200, b"")
            seen.append((answer.json()["status"], answer.json()["store"]))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert seen == [
        ("ok", "ok"),
        ("degraded", "unavailable: StoreUnavailableError('the store is away')"),
        ("ok", "ok"),
    ]


async def test_health_answers_before_the_store_was_reached_for_the_first_time() -> None:
    stop = asyncio.Event()
    ports: asyncio.Queue[int] = asyncio.Queue()
    running = asyncio.create_task(
        serve(
            WorkerSettings(ops_port=0),
            SchedulingSettings(),
            StoreSettings(url="redis://127.0.0.1:1/0"),  # no server listens there
            [PoolSettings()],
            stop=stop,
            on_ops_port=ports.put_nowait,
        )
    )
    port = await asyncio.wait_for(ports.get(), 60)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        answer = await client.get("/health")
    stop.set()
    await asyncio.wait_for(running, 60)

    assert (answer.status_code, answer.json()["status"]) == (200, "starting")
    assert answer.json()["store"] == "not reached yet"


async def test_a_taken_port_stops_the_start() -> None:
    app = create_app("w1", WorkerStatus(), WorkerMetrics())
    async with serve_ops(app, "127.0.0.1", 0) as port:
        with pytest.raises(OSError):
            async with serve_ops(app, "127.0.0.1", port):
                pass
