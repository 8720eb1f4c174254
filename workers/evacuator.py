"""Evacuator: the held requests of an instance that left service move to instances that take requests."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.evacuation import plan_evacuation
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.view import is_scheduled
from statestore.base import PoolStore
from statestore.queues import held_request
from workers.metrics import WorkerMetrics
from workers.moves import execute_moves
from workers.pool_reader import PoolReader


def reason_for(state: InstanceState) -> str:
    """Why requests leave an instance in this state; a label in metrics."""
    return "drain" if state is InstanceState.DRAINING else "instance_down"


def plan_tick(loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec]) -> tuple[str, ...]:
    """The instances to evacuate: out of service and with held requests, unless nobody could take them.

    A draining instance would serve what waits for it, and does where no other takes requests; moved, its requests
    are served sooner, and so the drain ends sooner.
    """
    if not any(map(is_scheduled, instances.values())):
        return ()
    return tuple(
        instance_id
        for instance_id, load in loads.items()
        if load.queued_requests and load.state is not InstanceState.READY
    )


class Evacuator:
    """Looks at every round, so leftovers of an interrupted evacuation are found as well."""

    name = "evacuator"

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        reader: PoolReader,
        *,
        interval_s: float,
        decode_stall_s: float,
        by_deadline: bool,
        metrics: WorkerMetrics,
    ) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._fence = fence
        self._reader = reader
        self._decode_stall_s = decode_stall_s
        self._by_deadline = by_deadline
        self._metrics = metrics

    async def tick(self) -> None:
        """Evacuate every instance that needs it. Raises StoreUnavailableError, LeaseLostError."""
        instances = (await self._reader.membership()).instances
        for instance_id in plan_tick(await self._reader.loads(), instances):
            await self._evacuate(instance_id, instances)

    async def _evacuate(self, instance_id: str, instances: Mapping[str, InstanceSpec]) -> None:
        snapshot = await self._pool.queue(instance_id)
        loads = await self._pool.loads()
        left = loads.get(instance_id)
        if snapshot is None or left is None or left.state is InstanceState.READY:
            return
        held = tuple(held_request(record, snapshot.now_ms) for record in snapshot.held)
        moves = plan_evacuation(
            held, instance_id, loads, instances, self._decode_stall_s, by_deadline=self._by_deadline
        )
        reason = reason_for(left.state)
        await execute_moves(self._pool, instance_id, moves, reason=reason, fence=self._fence, metrics=self._metrics)
