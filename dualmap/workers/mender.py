"""Mender: keeps what the store holds readable, whatever somebody wrote there."""

from __future__ import annotations

from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics


class Mender:
    """Looks once a second: until then calls that meet unreadable state fail, and replicas decide alone."""

    name = "mender"
    interval_s = 1.0

    def __init__(self, pool: PoolStore, fence: int, *, metrics: WorkerMetrics) -> None:
        self._pool = pool
        self._fence = fence
        self._metrics = metrics

    async def tick(self) -> None:
        """Mend once; the store's log line names each. Raises StoreError."""
        mended = await self._pool.upkeep.mend(fence=self._fence)
        self._metrics.mended.labels(self._pool.name).inc(mended)
