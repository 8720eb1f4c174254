"""A replica whose instances are servers of adapters, in place of a network."""

from __future__ import annotations

from typing import Any

from dualmap.router.pool.adapter_loads import AdapterLoads
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.engine_adapters import EngineAdapters
from tests.support.adapter_servers import AdapterServers


def serve(runtime: Runtime, servers: AdapterServers, clock: Any) -> ServedPool:
    """Have the replica reach these servers."""
    pool = runtime.pools.pools["default"]
    pool.adapter_loads = AdapterLoads(
        pool.store, pool.view, EngineAdapters(transport=servers), clock, runtime.context.metrics.pools["default"]
    )
    pool.model_lists._queries._transport = servers
    return pool
