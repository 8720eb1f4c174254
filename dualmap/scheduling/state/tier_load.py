"""The load of a request from the tiers of an instance, as a placement found it (``scheduling.estimates.kv_tiers``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

CUT_BLOCKS: Final = 2
"""Blocks at the end of a load that an engine may leave out, whose own blocks are larger."""


class Source(NamedTuple):
    """The instance that a request pulls from."""

    instance_id: str
    host: str
    port: int
    tokens: int
    own_s: float
    """Time of the pull over idle links."""


class InTier(NamedTuple):
    """What one tier has of a prompt behind those before it."""

    tier: str
    blocks: int
    used_ms: int
    """When they were used last, before this request, by the store's clock."""


class TierLoad(NamedTuple):
    """The loads of a request that is placed on an instance, and the blocks that its tiers have."""

    blocks: int
    load_s: float
    """Time of the loads, with those booked before them."""
    link_s: float
    """Time of the loads alone."""
    most_tokens: int | None = None
    """Tokens that its engine may load; None: all that the tiers have."""
    in_tiers: tuple[InTier, ...] = ()
    """What each tier has, the nearest first: loaded, or computed."""
    source: Source | None = None
    """The instance from whose cache the rest of ``blocks`` is pulled."""

    @classmethod
    def of(cls, found: Sequence[Any]) -> TierLoad:
        """The load of a text that has its fields as lists."""
        blocks, load_s, link_s, most_tokens, in_tiers, source = (*found, None)[:6]
        source = None if source is None else Source(*source)
        return cls(blocks, load_s, link_s, most_tokens, tuple([InTier(*each) for each in in_tiers]), source)

    @property
    def by_tier(self) -> Iterator[tuple[str, int, int]]:
        """Of each tier the blocks that are loaded, and those that are computed instead."""
        left = self.blocks
        for tier, blocks, _ in self.in_tiers:
            loaded = min(blocks, left)
            left -= loaded
            yield tier, loaded, blocks - loaded

    def disproved_by(self, cached_tokens: int, hit_blocks: int, block_tokens: int) -> InTier | None:
        """The tier that had less than was taken to be there, as the engine found so many cached tokens of the prompt,
        ``hit_blocks`` of it on the device; None where the answer disproves none.

        An engine that lacks a part of the device's hit has looked into no tier, and one that pulled may have been
        served less by its source. It may cut a load to its own larger blocks: that is no miss.
        """
        reached = hit_blocks * block_tokens
        if self.source is not None or cached_tokens < reached:
            return None
        for each, (_, loaded, _) in zip(self.in_tiers, self.by_tier, strict=True):
            reached += loaded * block_tokens
            if cached_tokens + CUT_BLOCKS * block_tokens < reached:
                return each
        return None


NO_LOAD: Final = TierLoad(0, 0.0, 0.0)
