"""The load of a request from the tiers of an instance, as a placement found it (``scheduling.estimates.kv_tiers``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple


class Source(NamedTuple):
    """The instance that a request pulls from."""

    instance_id: str
    host: str
    port: int
    tokens: int
    own_s: float
    """Time of the pull over idle links."""


class TierLoad(NamedTuple):
    """The loads of a request that is placed on an instance, and the blocks that its tiers have."""

    blocks: int
    load_s: float
    """Time of the loads, with those booked before them."""
    link_s: float
    """Time of the loads alone."""
    most_tokens: int | None = None
    """Tokens that its engine may load; None: all that the tiers have."""
    in_tiers: tuple[tuple[str, int], ...] = ()
    """Blocks that each tier has behind those before it, the nearest first: loaded, or computed."""
    source: Source | None = None
    """The instance from whose cache the rest of ``blocks`` is pulled."""

    @classmethod
    def of(cls, found: Sequence[Any]) -> TierLoad:
        """The load of a text that has its fields as lists."""
        blocks, load_s, link_s, most_tokens, in_tiers, source = (*found, None)[:6]
        source = None if source is None else Source(*source)
        return cls(blocks, load_s, link_s, most_tokens, tuple([(tier, count) for tier, count in in_tiers]), source)

    @property
    def by_tier(self) -> Iterator[tuple[str, int, int]]:
        """Of each tier the blocks that are loaded, and those that are computed instead."""
        left = self.blocks
        for tier, blocks in self.in_tiers:
            loaded = min(blocks, left)
            left -= loaded
            yield tier, loaded, blocks - loaded


NO_LOAD: Final = TierLoad(0, 0.0, 0.0)
