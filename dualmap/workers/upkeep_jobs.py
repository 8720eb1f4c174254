"""The leader's jobs that keep the store true: unreadable entries, drifted sums, dead replicas and ended drains."""

from __future__ import annotations

import logging

from dualmap.scheduling.queues.leader_jobs import PARKED, instances_to_park
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""A replica sends three heartbeats in a lease: enough time for each replica to send one again."""


class Mender:
    """Keeps what the store holds readable, whatever somebody wrote there. Until the next round, calls that meet
    unreadable state fail, and replicas decide alone."""

    name = "mender"
    interval_s = 1.0

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def tick(self) -> None:
        """Mend once; the store's log line names each. Raises StoreError."""
        context = self._context
        mended = await context.pool.upkeep.mend(fence=context.fence)
        context.metrics.mended.labels(context.pool.name).inc(mended)


class Repairer:
    """Recomputes the counts of every instance from its requests, counts how many had drifted, and drops old usage.

    The invariant: the pending tokens of an instance are the sum over its unprefilled requests.
    """

    name = "repairer"
    interval_s = 15.0

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def tick(self) -> None:
        """Repair once. Raises StoreUnavailableError, LeaseLostError."""
        context = self._context
        await context.pool.usage.drop_old(fence=context.fence)
        repaired = await context.pool.upkeep.repair(fence=context.fence)
        if repaired:
            context.metrics.drift_repaired.labels(context.pool.name).inc(repaired)
            log.error("sums had drifted pool=%s repaired=%d", context.pool.name, repaired)


class Reaper:
    """Finishes, in every round, the requests of replicas whose lease expired.

    After taking over and after a store outage it waits a grace period: leases expired while no replica could renew
    them, and living replicas must get the chance to send a heartbeat first.
    """

    name = "reaper"
    interval_s = 1.0

    def __init__(self, context: LeaderContext, *, grace_s: float = GRACE_S) -> None:
        self._context = context
        self._grace_s = grace_s
        self._begins_s = self._after_grace_s()
        """When reaping begins, by the worker's monotonic clock."""

    def _after_grace_s(self) -> float:
        return self._context.clock.monotonic_s() + self._grace_s

    async def tick(self) -> None:
        """Reap every expired replica; one that retired is no loss. Raises StoreUnavailableError, LeaseLostError."""
        try:
            expired = await self._context.pool.upkeep.expired_replicas()
            # The period is tested after the read: a store that fails there begins a new one.
            if self._context.clock.monotonic_s() < self._begins_s:
                return
            for replica_id, retired in expired.items():
                await self._reap(replica_id, retired=retired)
        except StoreUnavailableError:
            self._begins_s = self._after_grace_s()
            raise

    async def _reap(self, replica_id: str, *, retired: bool) -> None:
        requests = await self._context.pool.upkeep.reap(replica_id, fence=self._context.fence)
        self._context.metrics.reaped_requests.labels(self._context.pool.name).inc(requests)
        if retired:
            log.info("replica left pool=%s replica=%s requests=%d", self._context.pool.name, replica_id, requests)
            return
        self._context.metrics.reaped_replicas.labels(self._context.pool.name).inc()
        log.warning("replica reaped pool=%s replica=%s requests=%d", self._context.pool.name, replica_id, requests)


class Drainer:
    """Parks every draining instance that is empty, so that it can be removed, restarted or resumed."""

    name = "drainer"
    interval_s = 1.0

    def __init__(self, context: LeaderContext) -> None:
        self._context = context

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError, LeaseLostError."""
        context = self._context
        for instance_id in instances_to_park(await context.reader.loads()):
            parked = await context.pool.members.set_instance_state(
                instance_id, PARKED, expected=InstanceState.DRAINING, fence=context.fence
            )
            if parked:
                context.metrics.drained.labels(context.pool.name).inc()
                log.info("instance drained pool=%s instance=%s to=%s", context.pool.name, instance_id, PARKED)
