"""Moves of held requests: carried out with the leader's fence, counted and logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dualmap.scheduling.queues.leader_jobs import Moved, MovingPort
from dualmap.scheduling.queues.rebalance import MigrateStatus
from dualmap.scheduling.steps import Steps, drive
from dualmap.statestore.led import LedPool
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


class Mover:
    """Carries out the moves of one job."""

    def __init__(self, pool: PoolStore, fence: int, metrics: WorkerMetrics) -> None:
        self._pool_name = pool.name
        self._led = LedPool(pool, fence)
        self._metrics = metrics

    async def move(self, steps: Steps[MovingPort, tuple[Moved, ...]], reason: str) -> int:
        """How many moved. Raises StoreUnavailableError, LeaseLostError."""
        return count_moves(self._pool_name, await drive(steps, self._led), reason, self._metrics)


def count_moves(pool: str, moves: Sequence[Moved], reason: str, metrics: WorkerMetrics) -> int:
    """How many moved. A request that was granted, finished or moved meanwhile stays where it is."""
    by_source = dict[str, list[bool]]()
    for moved in moves:
        metrics.migrations.labels(pool, reason, moved.status).inc()
        by_source.setdefault(moved.source_id, []).append(moved.status == MigrateStatus.MIGRATED)
    for source_id, migrated in by_source.items():
        log.info(
            "moved pool=%s source=%s reason=%s planned=%d migrated=%d",
            pool, source_id, reason, len(migrated), sum(migrated),
        )  # fmt: skip
    return sum(map(sum, by_source.values()))
