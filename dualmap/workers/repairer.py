"""Repairer: recomputes every instance's counts from its requests and counts how many had drifted; drops old usage."""

from __future__ import annotations

import logging

from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


class Repairer:
    """The guard of the invariant: pending tokens of an instance = sum over its unprefilled requests."""

    name = "repairer"
    interval_s = 15.0

    def __init__(self, pool: PoolStore, fence: int, *, metrics: WorkerMetrics) -> None:
        self._pool = pool
        self._fence = fence
        self._metrics = metrics

    async def tick(self) -> None:
        """Repair once. Raises StoreUnavailableError, LeaseLostError."""
        await self._pool.usage.drop_old(fence=self._fence)
        repaired = await self._pool.upkeep.repair(fence=self._fence)
        if repaired:
            self._metrics.drift_repaired.labels(self._pool.name).inc(repaired)
            log.error("sums had drifted pool=%s repaired=%d", self._pool.name, repaired)
