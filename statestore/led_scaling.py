"""The pool's store as its leader's scaling rounds use it: every write carries the fence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduling.instance import InstanceState
from scheduling.scale_record import ScaleEntry, ScaleRecord
from statestore.base import PoolStore
from statestore.led import LedPool
from statestore.memory.state import PoolState


class LedScaling(LedPool):
    """The fleet of ``scheduling.scale_job``.

    Each call returns what the store's returns: an awaitable of a ``PoolStore``, the answer itself of a ``PoolState``.
    """

    def __init__(
        self,
        pool: PoolStore | PoolState,
        fence: int,
        *,
        now: Callable[[], Any],
        actuate: Callable[[ScaleRecord], Any],
    ) -> None:
        """``now`` gives a ``FleetNow``, ``actuate`` an ``ActuatorReply`` or None while the actuator works."""
        super().__init__(pool, fence)
        self.now = now
        self.actuate = actuate

    def scaling(self) -> Any:
        return self._pool.scaling()

    def record_scaling(self, record: ScaleRecord, entry: ScaleEntry) -> Any:
        return self._pool.record_scaling(record, entry, fence=self._fence)

    def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Any:
        return self._pool.recent_blocks(instance_ids, limit)

    def set_instance_state(self, instance_id: str, state: InstanceState, *, expected: InstanceState) -> Any:
        return self._pool.set_instance_state(instance_id, state, expected=expected, fence=self._fence)
