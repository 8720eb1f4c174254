"""What a placement costs beside the wait for others: the own recompute and the KV memory it takes, in seconds.

A recomputed token delays everybody queued behind it, so it weighs several times its own seconds. It also takes KV
memory a second time, for what the fleet holds elsewhere. Nothing is lost by that while there is memory that nobody
uses, and little while running requests leave the cache enough of it that what is evicted is old. Where they do not, it
evicts what others would have found, and its weight is several times as much.

KV memory in use counts by the tokens of the running requests' contexts, shared prefixes for each of them. That may be
several times the memory there is, and still tells more from less.
"""

from __future__ import annotations

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad
from scheduling.settings import SchedulingSettings
from scheduling.values import value

EVICTING_FROM = 0.7
"""``kv_demand`` up to which a full cache gives away what nobody misses."""
EVICTING_FULLY = 1.1
"""The same from which on whatever it gives away is missed."""


def evicting(load: InstanceLoad, block_tokens: int) -> float:
    """How much of what a recompute takes is taken from prefixes that others would find, 0..1."""
    squeezed = (load.kv_demand - EVICTING_FROM) / (EVICTING_FULLY - EVICTING_FROM)
    return load.cached_share(block_tokens) * min(1.0, max(0.0, squeezed))


@value
class PlacementCost:
    """The weights of policy ``dualmap-wide``; the store keeps a Lua twin of ``least_s``."""

    recompute_weight: float
    eviction_weight: float
    kv_weight_s: float

    @classmethod
    def of(cls, settings: SchedulingSettings) -> PlacementCost:
        wide = settings.dualmap_wide
        return cls(wide.recompute_weight, wide.eviction_weight, settings.kv_weight_s)

    def recompute_s(self, load: InstanceLoad, chain: Chain, hit_blocks: int) -> float:
        """Of the chain on the instance, after a hit of so many blocks."""
        weight = self.recompute_weight * (1.0 + self.eviction_weight * evicting(load, chain.block_tokens))
        return weight * chain.uncached_tokens(hit_blocks) / load.prefill_tokens_per_s

    def least_s(self, load: InstanceLoad, chain: Chain, hit_blocks: int) -> float:
        """Where the instance has nothing else to do; with more to do a placement costs more."""
        return self.recompute_s(load, chain, hit_blocks) + self.kv_weight_s * load.kv_demand
