"""Evacuator: the held requests of an instance that went down move to instances that are ready."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.evacuation import plan_evacuation
from scheduling.instance import InstanceLoad, InstanceState
from statestore.base import PoolStore
from statestore.queues import held_request
from workers.glance import Sight
from workers.metrics import WorkerMetrics
from workers.moves import execute_moves

REASON = "instance_down"


def is_lost(load: InstanceLoad, stuck_after_s: float) -> bool:
    """Whether nobody grants the instance's held requests any more: it is out of service, or drains and is stuck.

    Health checks do not take a draining instance down, so its standing still must be seen here.
    """
    if load.state is InstanceState.DRAINING:
        return load.stalled_s >= stuck_after_s
    return load.state in (InstanceState.DOWN, InstanceState.STANDBY)


def plan_tick(loads: Mapping[str, InstanceLoad], stuck_after_s: float) -> tuple[str, ...]:
    """The instances to evacuate: lost ones with held requests, unless nobody could take them."""
    if not any(load.state is InstanceState.READY for load in loads.values()):
        return ()
    return tuple(
        instance_id for instance_id, load in loads.items() if load.queued_requests and is_lost(load, stuck_after_s)
    )


class Evacuator:
    """Looks at every round, so leftovers of an interrupted evacuation are found as well."""

    name = "evacuator"

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        sight: Sight,
        *,
        interval_s: float,
        stuck_after_s: float,
        decode_stall_s: float,
        metrics: WorkerMetrics,
    ) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._fence = fence
        self._sight = sight
        self._stuck_after_s = stuck_after_s
        self._decode_stall_s = decode_stall_s
        self._metrics = metrics

    async def tick(self) -> None:
        """Evacuate every lost instance. Raises StoreUnavailableError, LeaseLostError."""
        for instance_id in plan_tick(await self._sight.loads(), self._stuck_after_s):
            await self._evacuate(instance_id)

    async def _evacuate(self, instance_id: str) -> None:
        snapshot = await self._pool.queue(instance_id)
        loads = await self._pool.loads()
        lost = loads.get(instance_id)
        if snapshot is None or lost is None or not is_lost(lost, self._stuck_after_s):
            return
        held = tuple(held_request(record, snapshot.now_ms) for record in snapshot.held)
        moves = plan_evacuation(held, instance_id, loads, self._decode_stall_s)
        await execute_moves(self._pool, instance_id, moves, reason=REASON, fence=self._fence, metrics=self._metrics)
