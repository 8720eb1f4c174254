"""A worker's own HTTP server: ``/health`` and ``/metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from dualmap.runtime.certificates import reported
from dualmap.runtime.extras import package_version
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.status import WorkerStatus


def create_app(worker_id: str, status: WorkerStatus, metrics: WorkerMetrics) -> FastAPI:
    """``/health`` answers 200 as long as the process works: restarting a worker does not bring a store back. It makes
    no store call, so that a store that hangs makes no probe time out."""
    app = FastAPI(title="DualMap worker", docs_url=None, redoc_url=None, openapi_url=None)

    @app.head("/health")
    @app.get("/health")
    async def health() -> dict[str, object]:
        pools = status.pools
        error = next((pool.store_error for pool in pools if pool.store_error), None) if pools else "not reached yet"
        leads = {pool.pool.name: {"leader": True, "fence": lease.fence} for pool in pools if (lease := pool.lease)}
        return {
            "status": "starting" if not pools else "ok" if error is None else "degraded",
            "version": package_version(),
            "worker_id": worker_id,
            "store": error or "ok",
            **({"certificates": reported(status.certificates)} if status.certificates else {}),
            "pools": {pool.pool.name: leads.get(pool.pool.name, {"leader": False}) for pool in pools},
        }

    @app.head("/metrics")
    @app.get("/metrics")
    async def exposition() -> Response:
        for followed in status.certificates:
            metrics.certificate(followed.report())
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its own signal handling: the worker decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_ops(app: FastAPI, host: str, port: int) -> AsyncIterator[int]:
    """Listen for the duration of the block; gives the port (``port`` 0 picks a free one).

    Raises OSError if the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = _EmbeddedServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="ops")
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=3.0)
        task.cancel()
        listener.close()
