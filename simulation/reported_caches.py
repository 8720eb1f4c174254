"""The store's KV metadata as a subscriber to the engines' KV events keeps them, in a simulated fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simulation.kv_pool import CacheChange, Journal
from statestore.kv_events import BOOKING_MS
from statestore.memory.instance import InstanceBook


class ReportedCaches:
    """Engines name blocks by a trace's ids, the store by the hashes of chains."""

    def __init__(self, instances: Mapping[str, InstanceBook]) -> None:
        self._instances = instances
        self._hashes: dict[int, int] = {}
        self._term_ends_s: dict[str, float] = {}

    def route(self, hash_ids: Iterable[int], hashes: Iterable[int]) -> None:
        """A request is routed by this chain; what it has beyond full blocks is never cached."""
        self._hashes.update(zip(hash_ids, hashes, strict=False))

    def apply(self, instance_id: str, journal: Journal, now_s: float) -> None:
        """What the engine's prefix cache did, in order. Bookings of a term ago that it never reported end."""
        kv, hashes = self._instances[instance_id].kv, self._hashes
        for change, block in journal:
            if change is CacheChange.STORED:
                kv.confirm((hashes[block],))
            elif change is CacheChange.REMOVED:
                kv.remove((hashes[block],))
            else:
                kv.clear()
        if now_s >= self._term_ends_s.get(instance_id, 0.0):
            self._term_ends_s[instance_id] = now_s + BOOKING_MS / 1000
            kv.end_term()
