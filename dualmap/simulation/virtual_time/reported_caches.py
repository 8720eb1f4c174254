"""The store's KV metadata as a subscriber to the engines' KV events keeps them, in a simulated fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.kv_pool import CacheChange, Journal
from dualmap.simulation.virtual_time.simulated_pool import SimulatedPool
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.kv_views import KvChange, KvViewStatus

_SUBSCRIBER = "simulator"


class ReportedCaches:
    """Engines name blocks by a trace's ids, the store by the hashes of chains."""

    def __init__(self, pool: SimulatedPool) -> None:
        self._pool = pool
        self._hashes: dict[int, int] = {}
        self._fences: dict[str, int] = {}
        self._applied = 0

    def route(self, hash_ids: Iterable[int], hashes: Iterable[int]) -> None:
        """A request is routed by this chain; what it has beyond full blocks is never cached."""
        self._hashes.update(zip(hash_ids, hashes, strict=False))

    def apply(self, instance_id: str, journal: Journal, now_s: float) -> None:
        """Apply the changes of the engine's prefix cache, in order. Bookings that it never reported end."""
        if instance_id not in self._fences:
            self._claim(instance_id)
        try:
            self._write(instance_id, journal, now_s)
        except LeaseLostError:  # it went down meanwhile: its cache began again
            self._claim(instance_id)
            self._write(instance_id, journal, now_s)

    def _claim(self, instance_id: str) -> None:
        store = self._pool.store
        claim = at_once(store.kv_events.claim(instance_id, _SUBSCRIBER))
        assert claim is not None  # nobody else subscribes in a simulated fleet
        self._fences[instance_id] = claim.fence
        at_once(store.kv_events.mark(instance_id, claim.fence, KvViewStatus.EXACT))

    def _write(self, instance_id: str, journal: Journal, now_s: float) -> None:
        fence, last = self._fences[instance_id], _last_cleared(journal)
        if last:
            at_once(self._pool.store.kv_events.mark(instance_id, fence, KvViewStatus.EXACT, drop=True))
        is_held = {self._hashes[block]: change is CacheChange.STORED for change, block in journal[last:]}
        stored = [block for block, held in is_held.items() if held]
        removed = [block for block, held in is_held.items() if not held]
        self._applied += 1
        change = KvChange(self._applied, now_s, stored, removed)
        at_once(self._pool.store.kv_events.apply(instance_id, fence, change))


def _last_cleared(journal: Sequence[tuple[CacheChange, int]]) -> int:
    """Entries up to the last one that cleared the cache."""
    return max((place for place, (change, _) in enumerate(journal, 1) if change is CacheChange.CLEARED), default=0)
