"""KV memory of one instance: blocks held by running requests and, in what is left, the prefix cache.

Every block is in exactly one place: *private* (tail of a prompt, generated tokens; known only to its request),
*pinned* (in the prefix cache and held by running requests), *idle* (in the prefix cache, held by no request, can be
evicted) or *empty*. A request that holds a block of the cache holds its whole prefix, and it gives its blocks back last
block first. So in least-recently-used order a block always comes before its prefix, and evicting from the front takes
leaf blocks first without looking at the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice


class CacheChange(Enum):
    """A change of the prefix cache."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    """All blocks were removed at once; no block is named."""


Journal = list[tuple[CacheChange, int]]


class KvPool:
    """Counts and identities of blocks; callers check ``available`` before they take."""

    def __init__(self, total_blocks: int, journal: Journal | None = None) -> None:
        """Make an empty pool. Every change of the prefix cache is appended to the ``journal``, if any; its owner
        empties it."""
        self.total_blocks = total_blocks
        self._journal = journal
        self.private_blocks = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def cached_blocks(self) -> int:
        return len(self._holders)

    @property
    def used_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self.private_blocks + len(self._holders) - len(self._idle)

    @property
    def empty_blocks(self) -> int:
        """Blocks that can be taken without evicting any."""
        return self.total_blocks - self.private_blocks - len(self._holders)

    @property
    def available_blocks(self) -> int:
        """Blocks that can be taken, evicting idle ones where needed."""
        return self.total_blocks - self.used_blocks

    def match(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """How many leading blocks of ``hashes`` (``limit`` at most) are cached, and how many of them are idle."""
        holders = self._holders
        hits = idle = 0
        for block in islice(hashes, limit):
            holding = holders.get(block)
            if holding is None:
                break
            hits += 1
            idle += holding == 0
        return hits, idle

    def hold(self, hashes: Iterable[int]) -> None:
        """Take blocks of the cache, or blocks that enter it, for one request; at most one block each.

        A block that another request computed meanwhile is shared rather than kept twice.
        """
        holders, idle = self._holders, self._idle
        for block in hashes:
            holding = holders.get(block)
            if holding is None:
                if self.empty_blocks == 0:
                    self._evict(1)
                holders[block] = 1
                if self._journal is not None:
                    self._journal.append((CacheChange.STORED, block))
            else:
                if holding == 0:
                    del idle[block]
                holders[block] = holding + 1

    def hold_hits(self, hashes: Sequence[int]) -> None:
        """Take blocks that were matched, for one request."""
        self.hold(hashes)

    def drop(self, hashes: Sequence[int]) -> None:
        """Give held blocks back, last first; those that no request holds any more stay cached as most recent."""
        holders, idle = self._holders, self._idle
        for block in reversed(hashes):
            holding = holders[block] - 1
            holders[block] = holding
            if holding == 0:
                idle[block] = None

    def take_private(self, blocks: int) -> None:
        missing = blocks - self.empty_blocks
        if missing > 0:
            self._evict(missing)
        self.private_blocks += blocks

    def give_private(self, blocks: int) -> None:
        self.private_blocks -= blocks

    def loadable(self, hashes: Sequence[int], first: int, limit: int) -> list[int]:
        """Blocks from the place ``first`` on that each tier behind the device has; there are none here."""
        return []

    def served_blocks(self, hashes: Sequence[int]) -> int:
        """How many leading ones of these blocks another engine can pull from here."""
        return self.match(hashes, len(hashes))[0]

    def clear_idle(self) -> int:
        """Forget every cached block that no request holds; returns how many."""
        count, journal = len(self._idle), self._journal
        if journal is not None and count == len(self._holders):
            journal.append((CacheChange.CLEARED, 0))
            self._journal = None
        self._evict(count)
        self._journal = journal
        return count

    def _evict(self, blocks: int) -> None:
        for _ in range(blocks):
            block, _none = self._idle.popitem(last=False)
            del self._holders[block]
            if self._journal is not None:
                self._journal.append((CacheChange.REMOVED, block))
