"""KV memory that only running requests can exhaust: a bound on what any cache, and any placement, could save.

Every block that was ever computed, on any instance, is a hit, and takes no memory until a request holds it. Memory of
running requests is as limited as in ``KvPool``. So a run with such pools shows what is lost because caches are small,
or separate: the rest is prefill of what no instance computed before, decoding, and waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from dualmap.simulation.engine.kv_pool import KvPool


class EndlessKvPool(KvPool):
    """One instance's pool.

    Args:
        total_blocks: what running requests may hold.
        computed: blocks computed so far, shared by the pools of a fleet.
    """

    def __init__(self, total_blocks: int, computed: set[int]) -> None:
        super().__init__(total_blocks)
        self._computed = computed

    @property
    def cached_blocks(self) -> int:
        return len(self._computed)

    def match(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """Match like ``KvPool``; hits that no request here holds yet must be taken, as idle ones."""
        computed, holders = self._computed, self._holders
        hits = idle = 0
        for block in islice(hashes, limit):
            if block not in computed:
                break
            hits += 1
            idle += block not in holders
        return hits, idle

    def hold(self, hashes: Iterable[int]) -> None:
        blocks = tuple(hashes)
        self._computed.update(blocks)
        super().hold(blocks)

    def drop(self, hashes: Sequence[int]) -> None:
        """Drop like ``KvPool``; blocks that no request holds any more take no memory, and stay known as computed."""
        super().drop(hashes)
        self.clear_idle()
