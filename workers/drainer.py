"""Drainer: notices when a draining instance has nothing left, so that it can be removed or restarted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set

from scheduling.instance import InstanceLoad, InstanceState
from statestore.base import PoolStore
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


def plan_tick(loads: Mapping[str, InstanceLoad]) -> frozenset[str]:
    """Draining instances with neither held nor running requests."""
    return frozenset(
        instance_id
        for instance_id, load in loads.items()
        if load.state is InstanceState.DRAINING and not load.queued_requests and not load.running_requests
    )


class Drainer:
    """Says once of every draining instance that it is empty. It stays draining: operators decide what next."""

    name = "drainer"

    def __init__(self, pool: PoolStore, *, interval_s: float, metrics: WorkerMetrics) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._metrics = metrics
        self._empty: Set[str] = frozenset()

    async def tick(self) -> None:
        """Look once. Raises StoreUnavailableError."""
        empty = plan_tick(await self._pool.loads())
        for instance_id in sorted(empty - self._empty):
            self._metrics.drained.labels(self._pool.name).inc()
            log.info("instance drained pool=%s instance=%s (nothing left on it)", self._pool.name, instance_id)
        self._empty = empty
