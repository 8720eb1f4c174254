"""Sweeper: plans every queue that holds requests, even if no transition made room there.

Replicas plan a queue when they make room. The rest is found here: a replica died between two steps, deadlines passed,
or an engine became idle, which can take deferred requests. Before that classes get what
their floors give them.
"""

from __future__ import annotations

import logging

from dualmap.scheduling.queues.floors import Floors
from dualmap.scheduling.queues.leader_jobs import serve_floors, sweep_queue
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.steps import drive
from dualmap.statestore.led import LedPool
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import PoolReader

log = logging.getLogger(__name__)


class Sweeper:
    """One round over all instances."""

    name = "sweeper"
    interval_s = 1.0

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        reader: PoolReader,
        order: QueueOrder,
        *,
        metrics: WorkerMetrics,
    ) -> None:
        self._pool = pool
        self._led = LedPool(pool, fence)
        self._reader = reader
        self._order = order
        self._floors = Floors(order)
        self._metrics = metrics

    async def tick(self) -> None:
        """Plan once on every instance that holds requests. Raises StoreUnavailableError, LeaseLostError."""
        holding = [name for name, load in (await self._reader.loads()).items() if load.queued_requests]
        self._floors.keep(holding)
        for instance_id in holding:
            if self._floors:
                await drive(serve_floors(instance_id, self._floors), self._led)
            granted = await drive(sweep_queue(instance_id, self._order), self._led)
            if granted:
                self._metrics.swept_granted.labels(self._pool.name).inc(granted)
                log.debug("swept pool=%s instance=%s granted=%d", self._pool.name, instance_id, granted)
