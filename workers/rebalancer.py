"""Rebalancer: moves held requests away from overloaded instances, on request of the routing path and by sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduling.rebalance import plan_rebalance, plan_sweep
from statestore.base import PoolStore
from statestore.clock import Clock
from statestore.queues import hot_queue
from workers.glance import Sight
from workers.metrics import WorkerMetrics
from workers.moves import execute_moves

REASON = "rebalance"


@dataclass(frozen=True, slots=True)
class Round:
    """What the next round looks at, and how long it may wait for a trigger first."""

    sweep: bool
    wait_s: float


def plan_tick(now_s: float, next_sweep_s: float) -> Round:
    """Sweep when it is due; until then listen for triggers."""
    return Round(sweep=True, wait_s=0.0) if now_s >= next_sweep_s else Round(sweep=False, wait_s=next_sweep_s - now_s)


class Rebalancer:
    """One round at a time, so that no two plans ever act on the same queue: never recursive."""

    name = "rebalancer"

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        sight: Sight,
        *,
        sweep_interval_s: float,
        min_gap_s: float,
        max_moves: int,
        decode_stall_s: float,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        self.interval_s = min_gap_s
        self._pool = pool
        self._fence = fence
        self._sight = sight
        self._sweep_interval_s = sweep_interval_s
        self._max_moves = max_moves
        self._decode_stall_s = decode_stall_s
        self._clock = clock
        self._metrics = metrics
        self._next_sweep_s = clock.monotonic_s()

    async def tick(self) -> None:
        """One sweep, or one wait for a trigger. Raises StoreUnavailableError, LeaseLostError."""
        plan = plan_tick(self._clock.monotonic_s(), self._next_sweep_s)
        if plan.sweep:
            await self._rebalance_all(plan_sweep(await self._sight.loads()), "sweep")
            self._next_sweep_s = self._clock.monotonic_s() + self._sweep_interval_s
        else:
            wanted = await self._pool.wanted_rebalances(plan.wait_s)
            await self._rebalance_all(dict.fromkeys(wanted), "triggered")

    async def _rebalance_all(self, instance_ids: Iterable[str], cause: str) -> None:
        for instance_id in instance_ids:
            self._metrics.rebalances.labels(self._pool.name, cause).inc()
            await self._rebalance(instance_id)

    async def _rebalance(self, instance_id: str) -> None:
        snapshot = await self._pool.queue(instance_id)
        if snapshot is None or not snapshot.held:
            return
        moves = plan_rebalance(hot_queue(snapshot), self._decode_stall_s)[: self._max_moves]
        await execute_moves(self._pool, instance_id, moves, reason=REASON, fence=self._fence, metrics=self._metrics)
