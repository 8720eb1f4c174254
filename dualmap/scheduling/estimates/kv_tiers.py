"""Memory behind the device's where blocks of the KV cache are kept too: tiers, and the price of loading from them.

A prompt's blocks are found on the device, loaded from a tier, or computed. A load takes a start and a time for each
token; loads of one instance and tier follow each other on its *link*. So

    TTFT = wait + compute of what is nowhere + loads, each behind what its link has before it

A load occupies no step of the engine: requests behind it are computed meanwhile.
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
        return self.start_s + tokens * self.token_s if tokens else 0.0
