"""Reaper: finishes what dead replicas left behind."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from statestore.base import PoolStore
from statestore.clock import Clock
from statestore.errors import StoreUnavailableError
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GracePeriod:
    """No reaping before ``until_s`` of the worker's monotonic clock."""

    until_s: float

    def over(self, now_s: float) -> bool:
        """Whether reaping is allowed again."""
        return now_s >= self.until_s


class Reaper:
    """Every round: whose lease ran out, and an end to their requests.

    After taking over and after a store outage it waits a grace period: leases ran on while nobody could renew
    them, and living replicas must get the chance to beat first.
    """

    name = "reaper"

    def __init__(
        self, pool: PoolStore, fence: int, *, interval_s: float, grace_s: float, clock: Clock, metrics: WorkerMetrics
    ) -> None:
        self.interval_s = interval_s
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
            expired = await self._pool.expired_replicas()
            if not self._grace_period.over(self._clock.monotonic_s()):
                return
            for replica_id, retired in expired.items():
                await self._reap(replica_id, retired=retired)
        except StoreUnavailableError:
            self._grace_period = self._new_grace_period()
            raise

    async def _reap(self, replica_id: str, *, retired: bool) -> None:
        requests = await self._pool.reap(replica_id, fence=self._fence)
        self._metrics.reaped_requests.labels(self._pool.name).inc(requests)
        if retired:
            log.info("replica left pool=%s replica=%s requests=%d", self._pool.name, replica_id, requests)
            return
        self._metrics.reaped_replicas.labels(self._pool.name).inc()
        log.warning("replica reaped pool=%s replica=%s requests=%d", self._pool.name, replica_id, requests)
