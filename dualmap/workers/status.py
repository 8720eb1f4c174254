"""A worker process's report about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dualmap.runtime.certificates import FollowedFiles
from dualmap.workers.pool_worker import PoolWorker


@dataclass(slots=True)
class WorkerStatus:
    """Empty until the store has been reached for the first time: ``/health`` answers before."""

    pools: Sequence[PoolWorker] = ()
    certificates: Sequence[FollowedFiles[Any]] = ()
