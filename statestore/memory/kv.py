"""Which blocks an instance is believed to hold: LRU metadata within the instance's capacity.

A block is *reserved* once a request with it is held for the instance, and *resident* once such a request is dispatched
there. Reserved blocks attract others of their prefix to the instance; only resident ones are computed before the
request that is dispatched next.

A chain is stamped from its last block to its first, so a block is always younger than every longer prefix that contains
it: what is evicted first is a leaf, and what is listed is closed under prefixes, and so is what is resident. A hit can
therefore be found by binary search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class KvMetadata:
    """The block hashes of one instance, least recently stamped first."""

    __slots__ = ("_resident",)

    def __init__(self) -> None:
        self._resident: OrderedDict[int, bool] = OrderedDict()
        """Whether it is resident, by hash."""

    def __len__(self) -> int:
        return len(self._resident)

    def hit_blocks(self, hashes: Sequence[int]) -> int:
        """Blocks at the head of the chain that are listed, reserved or resident; O(log chain)."""
        listed = self._resident
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in listed)

    def resident_blocks(self, hashes: Sequence[int]) -> int:
        """Blocks at the head of the chain that are resident; O(log chain)."""
        resident = self._resident.get
        return bisect_left(hashes, True, key=lambda block_hash: not resident(block_hash))

    def stamp(self, hashes: Sequence[int], resident_blocks: int, capacity_blocks: int) -> None:
        """Enter the chain as the youngest, its first blocks as resident, evicting the oldest beyond capacity."""
        listed = self._resident
        for position in range(min(len(hashes), capacity_blocks) - 1, -1, -1):
            listed[hashes[position]] = position < resident_blocks
            listed.move_to_end(hashes[position])
        for _ in range(len(listed) - capacity_blocks):
            listed.popitem(last=False)

    def clear(self) -> None:
        self._resident.clear()

    def oldest_first(self) -> list[int]:
        """Every listed hash in the order of eviction."""
        return list(self._resident)
