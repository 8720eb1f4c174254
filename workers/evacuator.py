"""Evacuator: the held requests of an instance that went down move to instances that are ready."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.evacuation import plan_evacuation
from scheduling.instance import InstanceLoad, InstanceState
from statestore.base import PoolStore
from statestore.queues import held_request
from workers.metrics import WorkerMetrics
from workers.moves import execute_moves

REASON = "instance_down"

_LOST = frozenset({InstanceState.DOWN, InstanceState.STANDBY})
"""States in which nobody grants the held requests of an instance."""


def plan_tick(loads: Mapping[str, InstanceLoad]) -> tuple[str, ...]:
    """The instances to evacuate: lost ones with held requests, unless nobody could take them."""
    if not any(load.state is InstanceState.READY for load in loads.values()):
        return ()
    return tuple(instance_id for instance_id, load in loads.items() if load.queued_requests and load.state in _LOST)


class Evacuator:
    """Looks at every round, so leftovers of an interrupted evacuation are found as well."""

    name = "evacuator"

    def __init__(
        self, pool: PoolStore, fence: int, *, interval_s: float, decode_stall_s: float, metrics: WorkerMetrics
    ) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._fence = fence
        self._decode_stall_s = decode_stall_s
        self._metrics = metrics

    async def tick(self) -> None:
        """Evacuate every lost instance. Raises StoreUnavailableError, LeaseLostError."""
        for instance_id in plan_tick(await self._pool.loads()):
            await self._evacuate(instance_id)

    async def _evacuate(self, instance_id: str) -> None:
        snapshot = await self._pool.queue(instance_id)
        loads = await self._pool.loads()
        lost = loads.get(instance_id)
        if snapshot is None or lost is None or lost.state not in _LOST:
            return
        held = tuple(held_request(record, snapshot.now_ms) for record in snapshot.held)
        moves = plan_evacuation(held, instance_id, loads, self._decode_stall_s)
        await execute_moves(self._pool, instance_id, moves, reason=REASON, fence=self._fence, metrics=self._metrics)
