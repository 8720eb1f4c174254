"""Drainer: parks a draining instance that has nothing left, so that it can be removed, restarted or resumed."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent, next_state
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import PoolReader

log = logging.getLogger(__name__)


_DRAINED = next_state(InstanceState.DRAINING, InstanceEvent.DRAINED)


def plan_tick(loads: Mapping[str, InstanceLoad]) -> tuple[str, ...]:
    """Draining instances with neither held nor running requests."""
    return tuple(
        instance_id
        for instance_id, load in loads.items()
        if load.state is InstanceState.DRAINING and not load.in_flight
    )


class Drainer:
    """Ends every drain whose instance is empty."""

    name = "drainer"
    interval_s = 1.0

    def __init__(self, pool: PoolStore, fence: int, reader: PoolReader, *, metrics: WorkerMetrics) -> None:
        self._reader = reader
        self._pool = pool
        self._fence = fence
        self._metrics = metrics

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError, LeaseLostError."""
        for instance_id in plan_tick(await self._reader.loads()):
            parked = await self._pool.members.set_instance_state(
                instance_id, _DRAINED, expected=InstanceState.DRAINING, fence=self._fence
            )
            if parked:
                self._metrics.drained.labels(self._pool.name).inc()
                log.info("instance drained pool=%s instance=%s to=%s", self._pool.name, instance_id, _DRAINED)
