"""What reservations leave for the leader: the arrival log and the wish for a rebalance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from statestore.base import Arrival


class ArrivalLog:
    """The heads of the latest routed chains, numbered from 1, oldest dropped first."""

    def __init__(self, max_entries: int, head_blocks: int) -> None:
        self._entries: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=max_entries)
        self._head_blocks = head_blocks
        self._last = 0

    def add(self, at_ms: int, hashes: tuple[int, ...]) -> None:
        self._last += 1
        self._entries.append((at_ms, hashes[: self._head_blocks]))

    def after(self, entry_id: str, limit: int) -> Sequence[Arrival]:
        """Up to ``limit`` entries behind ``entry_id`` that are still in the log, oldest first."""
        first = self._last - len(self._entries) + 1
        skip = max(0, int(entry_id) + 1 - first)
        return [
            Arrival(str(first + skip + index), at_ms, head)
            for index, (at_ms, head) in enumerate(islice(self._entries, skip, skip + limit))
        ]


class RebalanceWishes:
    """Instances found overloaded, each listed once, oldest first."""

    def __init__(self) -> None:
        self._wanted: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def add(self, instance_id: str, now_ms: int) -> None:
        self._wanted.setdefault(instance_id, now_ms)

    def take(self) -> list[str]:
        """Hand all of them out; ids of the same millisecond in id order."""
        taken = sorted(self._wanted, key=lambda instance_id: (self._wanted[instance_id], instance_id))
        self._wanted.clear()
        return taken

    def discard(self, instance_id: str) -> None:
        self._wanted.pop(instance_id, None)
