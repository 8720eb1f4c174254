"""What placements and first tokens leave for the leader: bounded logs, and requests for a rebalance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedLog(Generic[T]):
    """The latest entries, numbered from 1, oldest dropped first."""

    def __init__(self, max_entries: int) -> None:
        self._entries: deque[T] = deque(maxlen=max_entries)
        self._last = 0

    def add(self, entry: T) -> None:
        self._last += 1
        self._entries.append(entry)

    def after(self, entry_id: str, limit: int) -> Sequence[tuple[str, T]]:
        """Up to ``limit`` entries after ``entry_id`` that are still in the log, oldest first."""
        first = self._last - len(self._entries) + 1
        skip = max(0, int(entry_id) + 1 - first)
        found = islice(self._entries, skip, skip + limit)
        return [(str(first + skip + index), entry) for index, entry in enumerate(found)]


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
