"""Role mover: gives an instance of one role of a split pool to the other role while that is starved."""

from __future__ import annotations

import logging

from dualmap.scheduling.scaling.role_plan import RoleState, RoleTargets, plan_roles
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)


class RoleMover:
    """Gives instances to the side that starves, where prefill and decode are apart and the pool moves roles.

    The memory is of one term: a new leader watches for as long again before it moves anything.
    """

    name = "role mover"
    interval_s = 1.0

    def __init__(self, context: LeaderContext, scheduling: SchedulingSettings) -> None:
        self._context = context
        self._scheduling = scheduling
        self._state = RoleState(changed_ms=self._now_ms())

    def _now_ms(self) -> int:
        return round(self._context.clock.monotonic_s() * 1000)

    async def tick(self) -> None:
        """Plan, and change one role if that is due. Raises StoreUnavailableError, LeaseLostError."""
        context, reader = self._context, self._context.reader
        loads, members = await reader.loads(), await reader.membership()
        targets = RoleTargets.of(self._scheduling, members.learned)
        self._state, change = plan_roles(self._state, members.instances, loads, targets, self._now_ms())
        if change is None:
            return
        if await context.pool.members.update_instance(change.instance_id, {"role": change.role}, fence=context.fence):
            context.metrics.role_changes.labels(context.pool.name, change.role.value).inc()
            log.warning(
                "role changed pool=%s instance=%s role=%s: %s",
                context.pool.name,
                change.instance_id,
                change.role,
                change.reason,
            )
