"""Reaper: finishes what dead replicas left behind."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dualmap.runtime.clock import Clock
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""A replica sends three heartbeats in a lease: enough time for each replica to send one again."""


@dataclass(frozen=True, slots=True)
class GracePeriod:
    """No reaping before ``until_s`` of the worker's monotonic clock."""

    until_s: float

    def over(self, now_s: float) -> bool:
        """Whether reaping is allowed again."""
        return now_s >= self.until_s


class Reaper:
    """Finishes, in every round, the requests of replicas whose lease expired.

    After taking over and after a store outage it waits a grace period: leases expired while no replica could renew
    them, and living replicas must get the chance to send a heartbeat first.
    """

    name = "reaper"
    interval_s = 1.0

    def __init__(
        self, pool: PoolStore, fence: int, *, clock: Clock, metrics: WorkerMetrics, grace_s: float = GRACE_S
    ) -> None:
        self._pool = pool
        self._fence = fence
        self._grace_s = grace_s
        self._clock = clock
        self._metrics = metrics
        self._grace_period = self._new_grace_period()

    def _new_grace_period(self) -> GracePeriod:
        return GracePeriod(self._clock.monotonic_s() + self._grace_s)

    async def tick(self) -> None:
        """Reap every expired replica; one that retired is no loss. Raises StoreUnavailableError, LeaseLostError."""
        try:
            expired = await self._pool.upkeep.expired_replicas()
            # The period is tested after the read: a store that fails there begins a new one.
            if not self._grace_period.over(self._clock.monotonic_s()):
                return
            for replica_id, retired in expired.items():
                await self._reap(replica_id, retired=retired)
        except StoreUnavailableError:
            self._grace_period = self._new_grace_period()
            raise

    async def _reap(self, replica_id: str, *, retired: bool) -> None:
        requests = await self._pool.upkeep.reap(replica_id, fence=self._fence)
        self._metrics.reaped_requests.labels(self._pool.name).inc(requests)
        if retired:
            log.info("replica left pool=%s replica=%s requests=%d", self._pool.name, replica_id, requests)
            return
        self._metrics.reaped_replicas.labels(self._pool.name).inc()
        log.warning("replica reaped pool=%s replica=%s requests=%d", self._pool.name, replica_id, requests)
