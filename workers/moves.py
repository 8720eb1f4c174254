"""Carrying out planned moves of held requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from scheduling.rebalance import Move
from statestore.base import MigrateStatus, PoolStore
from statestore.errors import StoreError
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_CONCURRENT_MOVES = 32
"""Moves sent together; concurrent store calls share round trips."""


async def execute_moves(
    pool: PoolStore, source_id: str, moves: Sequence[Move], *, reason: str, fence: int, metrics: WorkerMetrics
) -> int:
    """Migrate each request, in plan order by batches; returns how many moved.

    A request that was granted, finished or moved meanwhile stays where it is: every move is atomic by itself.
    Raises the first StoreError after its batch is through, and sends no further batch.
    """
    migrated = 0
    for start in range(0, len(moves), _CONCURRENT_MOVES):
        batch = moves[start : start + _CONCURRENT_MOVES]
        answers = await asyncio.gather(
            *(pool.migrate(move.request_id, source_id, move.target_id, reason=reason, fence=fence) for move in batch),
            return_exceptions=True,
        )
        for answer in answers:
            status = answer.value if isinstance(answer, MigrateStatus) else "error"
            metrics.migrations.labels(pool.name, reason, status).inc()
            migrated += answer is MigrateStatus.MIGRATED
        _raise_first(answers)
    if moves:
        log.info(
            "moved pool=%s source=%s reason=%s planned=%d migrated=%d",
            pool.name,
            source_id,
            reason,
            len(moves),
            migrated,
        )
    return migrated


def _raise_first(answers: Sequence[MigrateStatus | BaseException]) -> None:
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    unexpected = [error for error in errors if not isinstance(error, StoreError)]
    if errors:
        raise (unexpected or errors)[0]
