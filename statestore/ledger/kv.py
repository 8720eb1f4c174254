"""Which blocks an instance is believed to hold: LRU metadata within the instance's capacity.

A chain is stamped from its last block to its first, so a block is always younger than every longer prefix that
contains it: what is evicted first is a leaf, and what is listed is closed under prefixes. A hit can therefore be
found by binary search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KvMetadata:
    """The block hashes of one instance, least recently stamped first."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def hit_blocks(self, hashes: Sequence[int]) -> int:
        """Blocks at the head of the chain that are listed; O(log chain)."""
        blocks = self._blocks
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def stamp(self, hashes: Sequence[int], capacity_blocks: int) -> None:
        """Enter the chain's first ``capacity_blocks`` blocks as the youngest, evicting the oldest beyond that."""
        blocks = self._blocks
        touch = blocks.move_to_end
        for block_hash in reversed(hashes[:capacity_blocks]):
            blocks[block_hash] = None
            touch(block_hash)
        for _ in range(len(blocks) - capacity_blocks):
            blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def oldest_first(self) -> list[int]:
        """Every listed hash in the order of eviction."""
        return list(self._blocks)
