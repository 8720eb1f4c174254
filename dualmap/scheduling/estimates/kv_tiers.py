"""Memory behind the device's where blocks of the KV cache are kept too: tiers, and the price of loading from them.

A prompt's blocks are found on the device, loaded from a tier, or computed. A load takes a start and a time for each
token; loads of one instance and tier follow each other on its *link*. So

    TTFT = wait + compute of what is nowhere + loads, each behind what its link has before it

A load occupies no step of the engine: requests behind it are computed meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from dualmap.scheduling.values import value


class Tier(StrEnum):
    """A kind of memory behind the device's, the nearest first."""

    HOST = "host"
    DISK = "disk"
    POOL = "pool"
    """A store that several instances share, over the network."""


@value
class LoadPrice:
    """The time that a load from one tier takes on an instance, apart from what its link has before it."""

    start_s: float
    token_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < math.inf or not 0 < self.token_s < math.inf:
            raise ValueError("a load needs a start of 0 or more seconds, and a time per token above 0")

    def load_s(self, tokens: int) -> float:
        """Time of a load of so many tokens; 0 for none."""
        return self.start_s + tokens * self.token_s if tokens else 0.0


@value
class InstanceTier:
    """One tier of an instance, as placements weigh it."""

    tier: Tier
    tokens: int
    """Its size: what was used longest ago is taken to be forgotten beyond."""
    price: LoadPrice


@value
class InstanceTiers:
    """The tiers of an instance, the nearest first."""

    tiers: tuple[InstanceTier, ...] = ()
    takes_limits: bool = True
    """Whether its engine loads no more than a request allows (``max_load_tokens``). One that does not loads all that
    its tiers have, whatever that costs."""


@value
class Load:
    """The blocks that are loaded for a request, and the time that this takes."""

    blocks: int = 0
    own_s: float = 0.0
    """Time of its loads alone."""
    most_tokens: int | None = None
    """Tokens that the request allows its engine to load; None: all that the tiers have."""


NO_LOAD: Final = Load()


def cheapest_load(
    tiers: InstanceTiers,
    found_blocks: Sequence[int],
    uncached_tokens: Sequence[int],
    block_tokens: int,
    tokens_per_s: float,
    queued_s: float,
) -> Load:
    """The load by which a request has its first token first: from none of the tiers, the nearest, or more of them.

    ``found_blocks`` are what each tier has of its prompt behind what those before it have, and ``uncached_tokens`` what
    is left to compute with nothing loaded, and with what each tier has. Links of tiers work side by side, so the
    slowest load counts; ``queued_s`` is what was booked on them before. Where no tier ever loads a token faster than it
    is computed, the request forbids loads even of what is not known to be there. The scripts have the same rule
    (``statestore/lua/shared/tiers.lua``).
    """
    least_s, best, blocks, slowest_s = uncached_tokens[0] / tokens_per_s, NO_LOAD, 0, 0.0
    for tier, count, left in zip(tiers.tiers, found_blocks, uncached_tokens[1:], strict=True):
        if not count:
            continue
        blocks += count
        slowest_s = max(slowest_s, tier.price.load_s(count * block_tokens))
        ends_s = queued_s + slowest_s + left / tokens_per_s
        if ends_s < least_s or not tiers.takes_limits:
            least_s, best = ends_s, Load(blocks, slowest_s)
    dear = [tier.price.token_s * tokens_per_s >= 1.0 for tier in tiers.tiers]
    never = tiers.takes_limits and bool(dear) and all(dear)
    if best.blocks == blocks and not never:
        return best
    return Load(best.blocks, best.own_s, best.blocks * block_tokens)
