"""Memory behind the device's: tiers that keep blocks of the prefix cache, and the links that they are loaded over.

Blocks that an engine computes are written to every tier at once, which is hidden behind compute, and stay there when
the device evicts them. A tier that is full forgets what was used longest ago, the end of a prompt before its beginning.

A link serves loads one after the other, in the order in which they were asked for. Links do not wait for each other.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualmap.scheduling.estimates.kv_tiers import LoadPrice, Tier
from dualmap.simulation.engine.kv_pool import CacheChange, Journal

MEDIA = {Tier.HOST: "CPU", Tier.DISK: "STORAGE", Tier.POOL: "STORAGE"}
"""The names of tiers in KV events."""


@dataclass(frozen=True, slots=True)
class KvTier:
    """One tier of an engine."""

    tier: Tier
    tokens: int = 0
    """Its size; 0: it is not there."""
    bytes_per_s: float = 25e9
    start_s: float = 0.001
    """Time of every load besides its bytes."""
    tells_removals: bool = True
    """Whether KV events report what it forgets."""

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 0 < self.bytes_per_s < math.inf or not 0 <= self.start_s < math.inf:
            raise ValueError("a tier needs tokens of 0 or more, bytes per second above 0, and a start of 0 or more")

    def price(self, bytes_per_token: int) -> LoadPrice:
        return LoadPrice(self.start_s, bytes_per_token / self.bytes_per_s)


class TierCache:
    """The blocks of one tier. Every change, or what it keeps alone, is appended to the ``journal``, if any; its owner
    empties it."""

    def __init__(self, blocks: int, journal: Journal | None = None, *, tells_removals: bool = True) -> None:
        self._blocks = blocks
        self._journal = journal
        self._tells_removals = tells_removals
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, hashes: Iterable[int]) -> None:
        """Keep blocks, as the youngest."""
        kept, journal = self._kept, self._journal
        for block in hashes:
            if block in kept:
                kept.move_to_end(block)
                continue
            kept[block] = None
            if journal is not None:
                journal.append((CacheChange.STORED, block))
            if len(kept) > self._blocks:
                lost, _none = kept.popitem(last=False)
                if journal is not None and self._tells_removals:
                    journal.append((CacheChange.REMOVED, lost))

    def touch(self, hashes: Sequence[int]) -> None:
        """A request has used these blocks of its prompt: those that are kept are the youngest, the first of them last
        to be forgotten."""
        kept = self._kept
        for block in reversed(hashes):
            if block in kept:
                kept.move_to_end(block)


@dataclass(slots=True)
class LoadCounts:
    """Counters of one link since its engine started, as the engine reports them."""

    loads: int = 0
    tokens: int = 0
    busy_s: float = 0.0


class TierLink:
    """The link of one instance to one tier."""

    def __init__(self, price: LoadPrice) -> None:
        self._price = price
        self._free_s = 0.0
        self.counts = LoadCounts()

    def load(self, tokens: int, now_s: float) -> float:
        """Begin a load behind those before it; when it ends. Times of calls must not go back."""
        busy_s = self._price.load_s(tokens)
        self._free_s = max(now_s, self._free_s) + busy_s
        counts = self.counts
        counts.loads += 1
        counts.tokens += tokens
        counts.busy_s += busy_s
        return self._free_s
