"""The context of a worker's jobs on a pool of a test."""

from __future__ import annotations

import random
from typing import Any

from dualmap.runtime.clock import RealClock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import PoolContext
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.settings import WorkerSettings


def context_of(pool: PoolStore, **parts: Any) -> PoolContext:
    """A context of ``parts``; the rest is the real clock, default settings, and metrics of its own."""
    worker_id = parts.get("worker_id", "w1")
    defaults: dict[str, Any] = {
        "settings": PoolSettings(),
        "worker": WorkerSettings(),
        "worker_id": worker_id,
        "clock": RealClock(),
        "metrics": WorkerMetrics(),
        "jitter": random.Random(worker_id),
    }
    return PoolContext(pool=pool, **{**defaults, **parts})
