"""Counting and logging what became of planned moves of held requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from scheduling.leader_jobs import Moved
from statestore.base import MigrateStatus
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


def count_moves(pool: str, source_id: str, moves: Sequence[Moved], reason: str, metrics: WorkerMetrics) -> int:
    """How many moved. A request that was granted, finished or moved meanwhile stays where it is."""
    for moved in moves:
        metrics.migrations.labels(pool, reason, moved.status).inc()
    migrated = sum(moved.status == MigrateStatus.MIGRATED for moved in moves)
    if moves:
        log.info(
            "moved pool=%s source=%s reason=%s planned=%d migrated=%d", pool, source_id, reason, len(moves), migrated
        )
    return migrated
