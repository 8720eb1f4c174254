"""KV memory of one instance whose model has cache groups of windows or states beside full attention.

All groups share the blocks of one memory. Full attention is kept as in ``KvPool``; of the other groups there are blocks
at the hit ends that prompts leave (``scheduling.prompts.cache_groups``), as vLLM keeps them by default: found, they
count as used last, and they are evicted like other idle blocks. Simplifications: what a running request needs of its
window, or of its state, takes no memory, and no group holds a block twice.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from dualmap.scheduling.prompts.cache_groups import CacheGroup, GroupKind, end_within, ends_left
from dualmap.simulation.engine.kv_pool import CacheChange, Journal, KvPool

_MOST_GROUPS: Final = 128


class HybridKvPool(KvPool):
    """One instance's pool.

    Args:
        total_blocks: blocks of memory, which all groups share.
        block_tokens: tokens in a block of full attention.
        groups: the other groups; their blocks are multiples of those.
        journal: changes of full attention, and of the others by ``named``.
    """

    def __init__(
        self, total_blocks: int, block_tokens: int, groups: Sequence[CacheGroup], journal: Journal | None = None
    ) -> None:
        super().__init__(total_blocks, journal)
        self._block_tokens = block_tokens
        self._groups = groups
        self._step_tokens = math.lcm(block_tokens, *(group.block_tokens for group in groups))
        self._wanted: defaultdict[int, set[int]] = defaultdict(set)
        """The groups that keep a block which ends with a block of full attention, as soon as that is computed."""

    def match(self, hashes: Sequence[int], limit: int) -> tuple[int, int]:
        reach, _ = super().match(hashes, limit)
        step = self._step_tokens // self._block_tokens
        hits = end_within(reach * self._block_tokens, self._block_tokens, self._step_tokens)
        while hits and not all(self._holds(number, hashes, hits) for number in range(len(self._groups))):
            hits -= step
        prompt_tokens = limit * self._block_tokens + 1
        for end in ends_left(prompt_tokens, self._block_tokens, self._step_tokens, hits, reach):
            for number in range(len(self._groups)):
                for place in self._needed(number, min(end, len(hashes))):
                    self._wanted[hashes[place]].add(number)
        return super().match(hashes, hits)

    def served_blocks(self, hashes: Sequence[int]) -> int:
        return 0  # blocks of full attention alone are no hit

    def hold(self, hashes: Iterable[int]) -> None:
        blocks = tuple(hashes)
        super().hold(blocks)
        for block in blocks:
            for number in self._wanted.pop(block, ()):
                self._keep(named(number, block))

    def hold_hits(self, hashes: Sequence[int]) -> None:
        super().hold(hashes)
        for number in range(len(self._groups)):
            for place in self._needed(number, len(hashes)):
                self._idle.move_to_end(named(number, hashes[place]))

    def _needed(self, number: int, end: int) -> range:
        """Places of the blocks of full attention with which the blocks end that a hit of ``end`` blocks needs."""
        group = self._groups[number]
        stride = group.block_tokens // self._block_tokens
        return range(end - 1, max(-1, end - 1 - group.needed_blocks * stride), -stride)

    def _holds(self, number: int, hashes: Sequence[int], end: int) -> bool:
        return all(named(number, hashes[place]) in self._holders for place in self._needed(number, end))

    def _keep(self, block: int) -> None:
        """A block of another group enters the cache, as the one that was used last; not where all memory is held."""
        if block in self._holders:
            self._idle.move_to_end(block)
            return
        if self.empty_blocks == 0:
            if not self._idle:
                return
            self._evict(1)
        self._holders[block] = 0
        self._idle[block] = None
        if self._journal is not None:
            self._journal.append((CacheChange.STORED, block))


def named(number: int, block: int) -> int:
    """The name of a group's block that ends as this block of full attention does; below 0, as no hash is."""
    return ~(block * _MOST_GROUPS + number)


def parts_of(name: int) -> tuple[int, int]:
    """The group of a block with such a name, and the hash."""
    block, number = divmod(~name, _MOST_GROUPS)
    return number, block


def groups_from(described: Sequence[str], block_tokens: int) -> tuple[CacheGroup, ...]:
    """Cache groups as ``window:TOKENS`` or ``state``, with the tokens of a block behind another colon where these are
    not those of full attention. Raises ValueError."""
    return tuple(_group_from(each, block_tokens) for each in described)


def _group_from(described: str, block_tokens: int) -> CacheGroup:
    found = re.fullmatch(r"(?:window:(?P<window>\d{1,9})|state)(?::(?P<size>\d{1,9}))?", described)
    if found is None:
        raise ValueError(f"{described!r} is no cache group: 'window:TOKENS[:BLOCK]' or 'state[:BLOCK]'")
    size_tokens = int(found["size"] or block_tokens)
    if size_tokens < 1 or size_tokens % block_tokens:
        raise ValueError(f"blocks of cache group {described!r} are no multiple of {block_tokens} tokens")
    if found["window"] is None:
        return CacheGroup(GroupKind.STATE, size_tokens)
    if int(found["window"]) < 1:
        raise ValueError(f"cache group {described!r} has no window")
    return CacheGroup(GroupKind.WINDOW, size_tokens, int(found["window"]))
