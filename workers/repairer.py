"""Repairer: recomputes every instance's sums from its requests and counts what had drifted."""

from __future__ import annotations

import logging

from statestore.base import PoolStore
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


class Repairer:
    """The guard of the invariant: pending tokens of an instance = sum over its unprefilled requests."""

    name = "repairer"

    def __init__(self, pool: PoolStore, fence: int, *, interval_s: float, metrics: WorkerMetrics) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._fence = fence
        self._metrics = metrics

    async def tick(self) -> None:
        """Repair once. Raises StoreUnavailableError, LeaseLostError."""
        repaired = await self._pool.repair(fence=self._fence)
        if repaired:
            self._metrics.drift_repaired.labels(self._pool.name).inc(repaired)
            log.error("sums had drifted pool=%s repaired=%d", self._pool.name, repaired)
