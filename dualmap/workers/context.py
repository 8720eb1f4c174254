"""The values that the work on one pool shares in a worker's process."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dualmap.runtime.clock import Clock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.statestore.led import LedPool
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import PoolReader
from dualmap.workers.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolContext:
    """A pool, and the process that works on it."""

    pool: PoolStore
    settings: PoolSettings
    worker: WorkerSettings
    worker_id: str
    clock: Clock
    metrics: WorkerMetrics
    jitter: random.Random
    time_scale: float = 1.0
    """Engine seconds in one second of the clock: jobs run so much more often."""

    def leading(self, fence: int, reader: PoolReader) -> LeaderContext:
        """The context of the leader's jobs for one term."""
        return LeaderContext(
            pool=self.pool,
            settings=self.settings,
            worker=self.worker,
            worker_id=self.worker_id,
            clock=self.clock,
            metrics=self.metrics,
            jitter=self.jitter,
            time_scale=self.time_scale,
            fence=fence,
            reader=reader,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderContext(PoolContext):
    """A pool in a term of its leader."""

    fence: int
    """The fence of every write of the term."""
    reader: PoolReader
    """Reads of members and loads before a job acts: no older than the pause between two of its rounds."""

    @property
    def led(self) -> LedPool:
        """The pool as the leader's steps see it."""
        return LedPool(self.pool, self.fence)
