"""KV memory of one instance with a second tier behind it: what the prefix cache evicts goes to host memory.

A hit there is loaded: its blocks return to the device, where they take the place of others. A block is in one of the
two places. Loading takes time (``EngineConfig.host_token_s``), which the step that takes the blocks waits for; moving
blocks out is hidden behind compute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from dualmap.simulation.engine.kv_pool import CacheChange, Journal, KvPool


class HostKvPool(KvPool):
    """One instance's pool.

    Args:
        total_blocks: blocks on the device.
        host_blocks: blocks in host memory.
        journal: as in ``KvPool``; a block is removed once it is in neither place.
    """

    def __init__(self, total_blocks: int, host_blocks: int, journal: Journal | None = None) -> None:
        super().__init__(total_blocks, journal)
        self._host_blocks = host_blocks
        self._host: OrderedDict[int, None] = OrderedDict()
        self._loaded_blocks = 0

    def match(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        """Match like ``KvPool``; hits in host memory must be taken, as idle ones."""
        holders, host = self._holders, self._host
        hits = idle = 0
        for block in islice(hashes, limit):
            holding = holders.get(block)
            if holding is None and block not in host:
                break
            hits += 1
            idle += not holding
        return hits, idle

    def hold(self, hashes: Iterable[int]) -> None:
        for block in hashes:
            self._host.pop(block, None)
            super().hold((block,))

    def hold_hits(self, hashes: Sequence[int]) -> None:
        self._loaded_blocks += sum(block in self._host for block in hashes)
        self.hold(hashes)

    def take_loaded(self) -> int:
        taken, self._loaded_blocks = self._loaded_blocks, 0
        return taken

    def clear_idle(self) -> int:
        cleared = len(self._host) + super().clear_idle()
        if self._journal is not None and self._holders:  # without a held block all were reported as cleared
            self._journal += [(CacheChange.REMOVED, block) for block in self._host]
        self._host.clear()
        return cleared

    def _evict(self, blocks: int) -> None:
        host = self._host
        for _ in range(blocks):
            block, _none = self._idle.popitem(last=False)
            del self._holders[block]
            host[block] = None
            if len(host) > self._host_blocks:
                lost, _none = host.popitem(last=False)
                if self._journal is not None:
                    self._journal.append((CacheChange.REMOVED, lost))
