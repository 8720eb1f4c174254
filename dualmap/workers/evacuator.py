"""Evacuator: the held requests of an instance that left service move to instances that take requests."""

from __future__ import annotations

from collections.abc import Mapping

from dualmap.scheduling.queues.leader_jobs import evacuate
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.view import is_ready
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.moves import Mover
from dualmap.workers.pool_reader import PoolReader


def reason_for(state: InstanceState) -> str:
    """Why requests leave an instance in this state; a label in metrics."""
    return "drain" if state is InstanceState.DRAINING else "instance_down"


def plan_tick(loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec]) -> tuple[str, ...]:
    """The instances to evacuate: out of service and with held requests, unless no instance could take them.

    A draining instance would serve its held requests, and does where no other takes requests. Moved, they are served
    sooner, and the drain ends sooner.
    """
    if not any(map(is_ready, instances.values())):
        return ()
    return tuple(
        instance_id
        for instance_id, load in loads.items()
        if load.queued_requests and load.state is not InstanceState.READY
    )


class Evacuator:
    """Checks all instances in every round, so leftovers of an interrupted evacuation are found as well."""

    name = "evacuator"
    interval_s = 0.5

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        reader: PoolReader,
        order: QueueOrder,
        *,
        decode_stall_s: float,
        metrics: WorkerMetrics,
    ) -> None:
        self._pool = pool
        self._mover = Mover(pool, fence, metrics)
        self._order = order
        self._reader = reader
        self._decode_stall_s = decode_stall_s

    async def tick(self) -> None:
        """Evacuate every instance that needs it. Raises StoreUnavailableError, LeaseLostError."""
        instances = (await self._reader.membership()).instances
        for instance_id in plan_tick(await self._reader.loads(), instances):
            await self._evacuate(instance_id, instances)

    async def _evacuate(self, instance_id: str, instances: Mapping[str, InstanceSpec]) -> None:
        loads = await self._pool.loads()
        left = loads.get(instance_id)
        if left is None or left.state is InstanceState.READY:
            return
        reason = reason_for(left.state)
        steps = evacuate(instance_id, self._order, loads, instances, reason=reason, decode_stall_s=self._decode_stall_s)
        await self._mover.move(steps, reason)
