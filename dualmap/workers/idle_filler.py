"""Idle filler: gives idle instances the held requests that their own queue would make late."""

from __future__ import annotations

from dualmap.scheduling.queues.idle_work import IdleWork
from dualmap.scheduling.queues.leader_jobs import give_idle_work
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.queues.rebalance import plan_sweep
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.moves import Mover
from dualmap.workers.pool_reader import PoolReader

REASON = "idle"
INTERVAL_S = 1.0


class IdleFiller:
    """A round reads the queues only while an instance is idle."""

    name = "idle filler"

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        reader: PoolReader,
        order: QueueOrder,
        *,
        decode_stall_s: float,
        metrics: WorkerMetrics,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.interval_s = interval_s
        self._mover = Mover(pool, fence, metrics)
        self._order = order
        self._reader = reader
        self._decode_stall_s = decode_stall_s

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError, LeaseLostError."""
        loads, instances = await self._reader.loads(), (await self._reader.membership()).instances
        known = {name: load for name, load in loads.items() if name in instances}
        idle = IdleWork(known, self._decode_stall_s, instances)
        steps = give_idle_work(plan_sweep(loads), self._order, idle, reason=REASON)
        await self._mover.move(steps, REASON)
