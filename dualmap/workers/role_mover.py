"""Role mover: gives an instance of one role of a split pool to the other role while that is starved."""

from __future__ import annotations

import logging

from dualmap.runtime.clock import Clock
from dualmap.scheduling.scaling.role_plan import RoleState, RoleTargets, plan_roles
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import PoolReader

log = logging.getLogger(__name__)


class RoleMover:
    """Its memory is of one term: a new leader watches for as long again before it moves anything."""

    name = "role mover"
    interval_s = 1.0

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        reader: PoolReader,
        *,
        scheduling: SchedulingSettings,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        self._pool = pool
        self._fence = fence
        self._reader = reader
        self._scheduling = scheduling
        self._clock = clock
        self._metrics = metrics
        self._state = RoleState(changed_ms=round(clock.monotonic_s() * 1000))

    async def tick(self) -> None:
        """Plan, and change one role if that is due. Raises StoreUnavailableError, LeaseLostError."""
        loads, members = await self._reader.loads(), await self._reader.membership()
        targets = RoleTargets.of(self._scheduling, members.learned)
        now_ms = round(self._clock.monotonic_s() * 1000)
        self._state, change = plan_roles(self._state, members.instances, loads, targets, now_ms)
        if change is None:
            return
        if await self._pool.members.update_instance(change.instance_id, {"role": change.role}, fence=self._fence):
            self._metrics.role_changes.labels(self._pool.name, change.role.value).inc()
            log.warning(
                "role changed pool=%s instance=%s role=%s: %s",
                self._pool.name,
                change.instance_id,
                change.role,
                change.reason,
            )
