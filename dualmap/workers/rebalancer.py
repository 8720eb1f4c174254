"""Rebalancer: moves held requests away from overloaded instances, on request of the routing path and by sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dualmap.runtime.clock import Clock
from dualmap.scheduling.queues.leader_jobs import rebalance
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.queues.rebalance import plan_sweep
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.moves import Mover
from dualmap.workers.pool_reader import PoolReader

REASON = "rebalance"
SWEEP_INTERVAL_S = 1.0
MIN_GAP_S = 0.02
"""Shortest time between two rounds for triggers, so that those of a burst share one."""
MAX_MOVES = 256
"""Migrations of one round on one instance: its bound in time."""

_LONGEST_WAIT_S = 1.0
"""Longest wait for a trigger in one round: a round must end within the bound of every job's rounds."""


@dataclass(frozen=True, slots=True)
class TickPlan:
    """Whether the next round sweeps, and how long it may wait for a trigger first."""

    sweep: bool
    wait_s: float


def plan_tick(now_s: float, next_sweep_s: float) -> TickPlan:
    """Sweep when it is due; until then listen for triggers."""
    if now_s >= next_sweep_s:
        return TickPlan(sweep=True, wait_s=0.0)
    return TickPlan(sweep=False, wait_s=min(_LONGEST_WAIT_S, next_sweep_s - now_s))


class Rebalancer:
    """One round at a time, so that no two plans ever act on the same queue: never recursive."""

    name = "rebalancer"

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        reader: PoolReader,
        order: QueueOrder,
        *,
        decode_stall_s: float,
        clock: Clock,
        metrics: WorkerMetrics,
        sweep_interval_s: float = SWEEP_INTERVAL_S,
        max_moves: int = MAX_MOVES,
    ) -> None:
        self.interval_s = MIN_GAP_S
        self._pool = pool
        self._mover = Mover(pool, fence, metrics)
        self._order = order
        self._reader = reader
        self._sweep_interval_s = sweep_interval_s
        self._max_moves = max_moves
        self._decode_stall_s = decode_stall_s
        self._clock = clock
        self._metrics = metrics
        self._next_sweep_s = clock.monotonic_s()
        self._fruitless: set[str] = set()
        """Instances whose trigger since the last sweep led to no move: under lasting overload every request would
        trigger another round, and each reads a whole queue. The next sweep clears the set."""

    async def tick(self) -> None:
        """One sweep, or one wait for a trigger. Raises StoreUnavailableError, LeaseLostError."""
        plan = plan_tick(self._clock.monotonic_s(), self._next_sweep_s)
        if plan.sweep:
            self._fruitless.clear()
            await self._rebalance_all(plan_sweep(await self._reader.loads()), "sweep")
            self._next_sweep_s = self._clock.monotonic_s() + self._sweep_interval_s
        else:
            wanted = await self._pool.queues.wanted_rebalances(plan.wait_s)
            await self._rebalance_all([name for name in wanted if name not in self._fruitless], "triggered")

    async def _rebalance_all(self, instance_ids: Iterable[str], cause: str) -> None:
        """Rebalance each; then pause for as long as that took, so that overload costs half of the time at most."""
        started_s = self._clock.monotonic_s()
        for instance_id in dict.fromkeys(instance_ids):
            self._metrics.rebalances.labels(self._pool.name, cause).inc()
            if not await self._rebalance(instance_id) and cause == "triggered":
                self._fruitless.add(instance_id)
        self.interval_s = max(MIN_GAP_S, self._clock.monotonic_s() - started_s)

    async def _rebalance(self, instance_id: str) -> int:
        """One round for one instance; returns how many requests moved."""
        steps = rebalance(
            instance_id,
            self._order,
            reason=REASON,
            decode_stall_s=self._decode_stall_s,
            max_moves=self._max_moves,
        )
        return await self._mover.move(steps, REASON)
