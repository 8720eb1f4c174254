"""Values that are kept up to a number of bytes, those of the last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """Drops what was used least recently."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.memory_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def keep(self, key: K, value: V, size_bytes: int) -> None:
        before = self._values.pop(key, None)
        self._values[key] = value, size_bytes
        self.memory_bytes += size_bytes - (0 if before is None else before[1])
        while self.memory_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._values.popitem(last=False)
            self.memory_bytes -= freed_bytes
