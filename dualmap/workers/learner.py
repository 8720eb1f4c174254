"""Learner: learns from first tokens and ends of requests, once for all replicas, and publishes.

One learner lives for one term of leadership. It reads the sample log from its beginning.
"""

from __future__ import annotations

from dualmap.scheduling.estimates.learning import FleetLearner
from dualmap.scheduling.queues.leader_jobs import LearningKeeper
from dualmap.scheduling.steps import drive
from dualmap.statestore.led import LedPool
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import PoolReader


class Learner:
    """Owns the learned model of one pool for one term."""

    name = "learner"
    interval_s = 1.0

    def __init__(self, pool: PoolStore, fence: int, reader: PoolReader, *, metrics: WorkerMetrics) -> None:
        self._pool = pool
        self._led = LedPool(pool, fence)
        self._reader = reader
        self._metrics = metrics
        self._keeper: LearningKeeper | None = None

    async def tick(self) -> None:
        """Learn what was logged since the last round. Raises StoreUnavailableError, LeaseLostError."""
        if self._keeper is None:
            self._keeper = LearningKeeper(FleetLearner((await self._pool.membership()).learned))
        loads, instances = await self._reader.loads(), (await self._reader.membership()).instances
        samples = await drive(self._keeper.tick(loads, instances, await self._pool.now_ms()), self._led)
        self._metrics.samples.labels(self._pool.name).inc(samples)
