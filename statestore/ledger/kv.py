"""Which blocks an instance is believed to hold: LRU metadata within the instance's capacity.

A block is *promised* once a request with it is placed on the instance, and *given* once such a request is dispatched
there. Promised blocks draw others of their prefix to the instance. Only given ones are computed before whatever is
dispatched next: as long as the request that brings a block is held, another one may overtake it.

A chain is stamped from its last block to its first, so a block is always younger than every longer prefix that
contains it: what is evicted first is a leaf, and what is listed is closed under prefixes, and so is what is given. A
hit can therefore be found by binary search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence


class KvMetadata:
    """The block hashes of one instance, least recently stamped first."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, bool] = OrderedDict()
        """Whether it is given, by hash."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def hit_blocks(self, hashes: Sequence[int]) -> int:
        """Blocks at the head of the chain that are listed, promised or given; O(log chain)."""
        return _head_blocks(hashes, self._blocks.__contains__, 0, len(hashes))

    def given_blocks(self, hashes: Sequence[int], guess: int = 0) -> int:
        """Blocks at the head of the chain that are given; O(log chain), and O(1) if it is as many as the ``guess``."""
        given, blocks = self._blocks.get, len(hashes)
        guess = max(0, min(guess, blocks))
        if guess > 0 and not given(hashes[guess - 1]):
            return _head_blocks(hashes, given, 0, guess - 1)
        if guess == blocks or not given(hashes[guess]):
            return guess
        return _head_blocks(hashes, given, guess + 1, blocks)

    def promise(self, hashes: Sequence[int], capacity_blocks: int) -> None:
        """Enter the chain's first ``capacity_blocks`` blocks as the youngest, evicting the oldest beyond that."""
        self._stamp(hashes[:capacity_blocks], self.given_blocks(hashes), capacity_blocks)

    def give(self, hashes: Sequence[int], capacity_blocks: int) -> None:
        """The same, for a chain that the instance has from now on."""
        self._stamp(hashes[:capacity_blocks], capacity_blocks, capacity_blocks)

    def _stamp(self, hashes: Sequence[int], given: int, capacity_blocks: int) -> None:
        blocks = self._blocks
        touch = blocks.move_to_end
        for position in range(len(hashes) - 1, -1, -1):
            block_hash = hashes[position]
            blocks[block_hash] = position < given
            touch(block_hash)
        for _ in range(len(blocks) - capacity_blocks):
            blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def oldest_first(self) -> list[int]:
        """Every listed hash in the order of eviction."""
        return list(self._blocks)


def _head_blocks(hashes: Sequence[int], holds: Callable[[int], bool | None], least: int, most: int) -> int:
    """How many blocks at the head of a chain hold a property that is closed under prefixes: from least to most."""
    return bisect_left(hashes, True, least, most, key=lambda block_hash: not holds(block_hash))
