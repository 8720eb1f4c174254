"""One worker process: opens the store, campaigns for every pool, steps down cleanly on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TypeVar

from prometheus_client import disable_created_metrics

from dualmap.runtime.clock import Clock, RealClock
from dualmap.runtime.collector import settle_collector
from dualmap.runtime.open_files import raise_open_files_limit
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.url import without_password
from dualmap.workers.context import PoolContext
from dualmap.workers.loop import BACKOFF_FIRST_S, BACKOFF_MAX_S
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_worker import PoolWorker
from dualmap.workers.settings import WorkerSettings
from dualmap.workers.status import WorkerStatus

log = logging.getLogger(__name__)

OUTAGE_REPEATED_AT = 32
"""Failures after which an outage, about two minutes long then, is logged once more."""

T = TypeVar("T")


def new_worker_id() -> str:
    """Unique among all workers ever: a lease must not be taken for another process's."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


async def serve(
    worker: WorkerSettings,
    scheduling: SchedulingSettings,
    store: StoreSettings,
    pools: Sequence[PoolSettings],
    *,
    trust: InstanceTrust | None = None,
    worker_id: str | None = None,
    clock: Clock | None = None,
    stop: asyncio.Event | None = None,
    on_ops_port: Callable[[int], None] | None = None,
) -> None:
    """Run until SIGTERM, SIGINT or ``stop``; then stop the jobs, release leadership and close the store.

    A store that is not there yet is waited for, and ``/health`` answers meanwhile. ``on_ops_port`` gets the
    port of ``/health`` and ``/metrics`` once they answer.

    Raises:
        StoreConfigurationError: the store's URL or server cannot serve a fleet, or another version uses a pool, beside
            which this one must not run.
        OSError: the ops address cannot be listened on.
    """
    owner = worker_id or new_worker_id()
    stopping = stop or asyncio.Event()
    waiting = clock or RealClock()
    disable_created_metrics()  # type: ignore[no-untyped-call]  # an unused second series per counter
    raise_open_files_limit()  # a health check takes one per instance
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every single health check
    with _stop_on_signals(stopping):
        log.info("worker starting worker=%s pid=%d pools=%s", owner, os.getpid(), ",".join(p.name for p in pools))
        metrics, status = WorkerMetrics(pool.name for pool in pools), WorkerStatus()
        async with _ops(worker, owner, status, metrics) as port:
            if port is not None:
                log.info("worker listening worker=%s host=%s port=%d", owner, worker.ops_host, port)
                if on_ops_port is not None:
                    on_ops_port(port)
            opened = await _until(stopping, _open(store, scheduling, waiting, [pool.name for pool in pools]))
            if opened is None:
                return
            try:
                workers = _pool_workers(opened, worker, pools, trust, owner, waiting, metrics, scheduling.time_scale)
                status.pools = workers
                status.certificates = (*(trust.certificates if trust is not None else ()), *opened.certificates)
                settle_collector()
                await _until(stopping, _run_pools(workers))
            finally:
                await opened.close()
                log.info("worker stopped worker=%s", owner)


def _pool_workers(
    store: Store,
    worker: WorkerSettings,
    pools: Sequence[PoolSettings],
    trust: InstanceTrust | None,
    owner: str,
    clock: Clock,
    metrics: WorkerMetrics,
    time_scale: float,
) -> list[PoolWorker]:
    return [
        PoolWorker(
            PoolContext(
                pool=store.pool(pool.name),
                settings=pool,
                worker=worker,
                worker_id=owner,
                clock=clock,
                metrics=metrics,
                jitter=random.Random(f"{owner}/{pool.name}"),
                time_scale=time_scale,
            ),
            store,
            trust=trust,
        )
        for pool in pools
    ]


async def _run_pools(workers: Sequence[PoolWorker]) -> None:
    async with asyncio.TaskGroup() as group:
        for pool_worker in workers:
            group.create_task(pool_worker.run(), name=f"pool/{pool_worker.pool.name}")


@contextlib.asynccontextmanager
async def _ops(
    worker: WorkerSettings, owner: str, status: WorkerStatus, metrics: WorkerMetrics
) -> AsyncIterator[int | None]:
    if worker.ops_port is None:
        yield None
        return
    from dualmap.workers.ops import create_app, serve_ops  # the web framework is loaded only where it is used

    async with serve_ops(create_app(owner, status, metrics), worker.ops_host, worker.ops_port) as port:
        yield port


async def _open(settings: StoreSettings, scheduling: SchedulingSettings, clock: Clock, pools: Sequence[str]) -> Store:
    failures, said = 0, ""
    while True:
        try:
            store = await open_store(settings, scheduling=scheduling, shared=True)
            try:
                await _enter(store, pools)
            except BaseException:
                await store.close()
                raise
            return store
        except StoreUnavailableError as error:
            failures += 1
            if str(error) != said or (failures >= OUTAGE_REPEATED_AT and worth_logging(failures)):
                url = without_password(settings.url)
                log.warning("waiting for the store url=%s failures=%d: %s", url, failures, error)
                said = str(error)
        await clock.sleep(backoff_s(failures, first_s=BACKOFF_FIRST_S, longest_s=BACKOFF_MAX_S))


async def _enter(store: Store, pools: Sequence[str]) -> None:
    """Raises StoreUnavailableError and StoreSchemaError. What else is wrong in a pool, its leader mends: this worker
    may be the one."""
    for name in pools:
        try:
            await store.pool(name).schema.enter()
        except (StoreUnavailableError, StoreConfigurationError):
            raise
        except StoreError as error:
            log.warning("the schema could not be entered pool=%s error=%s", name, error)


async def _until(stopping: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """Await ``work``; once ``stopping`` is set, cancel it, wait for its clean-up and return None."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


@contextlib.contextmanager
def _stop_on_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Set ``stopping`` on SIGTERM and SIGINT; without effect off the main thread, where signals never arrive."""
    loop = asyncio.get_running_loop()
    handled = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
