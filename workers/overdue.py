"""Overdue: grants requests that stepped behind others for as long as anybody may be made to wait."""

from __future__ import annotations

import logging

from statestore.base import PoolStore
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


class OverdueGranter:
    """Queue order ``deadline`` lets hopeless requests step behind; this keeps the bound on their wait."""

    name = "overdue"

    def __init__(self, pool: PoolStore, fence: int, *, interval_s: float, metrics: WorkerMetrics) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._fence = fence
        self._metrics = metrics

    async def tick(self) -> None:
        """Grant once on every instance. Raises StoreUnavailableError, LeaseLostError."""
        granted = await self._pool.grant_overdue(fence=self._fence)
        if granted:
            self._metrics.overdue_granted.labels(self._pool.name).inc(granted)
            log.info("overdue requests granted pool=%s requests=%d", self._pool.name, granted)
