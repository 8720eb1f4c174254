"""KV memory of one instance with tiers behind it: what the prefix cache evicts can be loaded from there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from dualmap.simulation.engine.kv_pool import Journal, KvPool
from dualmap.simulation.engine.kv_tiers import TierCache


class TieredKvPool(KvPool):
    """One instance's pool.

    Args:
        total_blocks: blocks on the device.
        tiers: the tiers, the nearest first; one that is shared is of several pools.
        journal: changes of the device alone; each tier has its own.
    """

    def __init__(self, total_blocks: int, tiers: Sequence[TierCache], journal: Journal | None = None) -> None:
        super().__init__(total_blocks, journal)
        self.tiers = tiers

    def hold(self, hashes: Iterable[int]) -> None:
        blocks = tuple(hashes)
        super().hold(blocks)
        for tier in self.tiers:
            tier.keep(blocks)

    def drop(self, hashes: Sequence[int]) -> None:
        super().drop(hashes)
        for tier in self.tiers:
            tier.touch(hashes)

    def served_blocks(self, hashes: Sequence[int]) -> int:
        served = next((place for place, block in enumerate(hashes) if not self._has(block)), len(hashes))
        for tier in self.tiers:
            tier.touch(hashes[:served])
        return served

    def _has(self, block: int) -> bool:
        return block in self._holders or any(block in tier for tier in self.tiers)

    def loadable(self, hashes: Sequence[int], first: int, limit: int) -> list[int]:
        """Blocks that each tier has of those from the place ``first`` up to ``limit``, until one that none has. The
        nearest tier that has a block counts it."""
        found = [0] * len(self.tiers)
        for block in islice(hashes, first, limit):
            place = next((place for place, tier in enumerate(self.tiers) if block in tier), None)
            if place is None:
                break
            found[place] += 1
        return found
