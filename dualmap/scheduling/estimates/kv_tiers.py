"""Memory behind the device's where blocks of the KV cache are kept too: tiers, and the price of loading from them.

A prompt's blocks are found on the device, loaded from a tier, or computed. A load takes a start and a time for each
token; loads of one instance and tier follow each other on its *link*. So

    TTFT = wait + compute of what is nowhere + loads, each behind what its link has before it

A load occupies no step of the engine: requests behind it are computed meanwhile. But it keeps its link, as computing
keeps the engine. So whether to load is decided like where to place: a request may load nothing, what the nearest tier
has, or more of them, and each of these is weighed as a placement of its own (``scheduling.estimates.weights``). The
policy's cost says what a second of either is worth to those that come later.

Links of tiers work side by side, so the slowest load counts. Where no tier of an instance ever loads a token faster
than it is computed, the request forbids loads even of what is not known to be there.
"""

from __future__ import annotations

import math
from enum import StrEnum

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
        return load_time_s(self.start_s, self.token_s, tokens)


@value
class InstanceTier:
    """One tier of an instance, as placements weigh it."""

    tier: Tier
    tokens: int
    """Its size: what was used longest ago is taken to be forgotten beyond."""
    price: LoadPrice
    reason: str = ""
    """Why the price is a default, in words; empty where it is measured."""


@value
class PullEnd:
    """The part that an instance takes in pulls, to it and from it (``scheduling.estimates.pulls``)."""

    host: str
    port: int
    """Its place, as its peers reach it."""
    layout: str
    """The form in which it keeps blocks: both ends of a pull must have the same."""
    price: LoadPrice
    """The time of a pull to it over idle links."""
    reason: str = ""
    """Why the price is a default, in words; empty where it is measured."""
    fails_requests: bool = False
    """Its engine fails a request whose pull is lost, in place of computing the prompt."""


@value
class InstanceTiers:
    """The tiers of an instance, the nearest first, and its part in pulls."""

    tiers: tuple[InstanceTier, ...] = ()
    takes_limits: bool = True
    """Whether its engine loads no more than a request allows (``max_load_tokens``). One that does not loads all that
    its tiers have, whatever that costs."""
    pulls: PullEnd | None = None
    """None: nothing is pulled to it or from it."""
    no_pulls: str = ""
    """Why that is so where the pool has pulls, in words."""


def load_time_s(start_s: float, token_s: float, tokens: int) -> float:
    """The time of a load from one tier alone; of none, 0. The scripts run the same rule."""
    return start_s + tokens * token_s if tokens > 0 else 0.0


def is_slow(token_s: float, prefill_tokens_per_s: float) -> bool:
    """Whether no load from a tier, however long, takes less time than computing. The scripts run the same rule."""
    return token_s * prefill_tokens_per_s >= 1.0
