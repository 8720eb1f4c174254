"""Reports of engines about their KV caches: who reads them, how far, and what they change in the KV metadata.

One *subscriber* reads the KV events of an instance and translates them (``scheduling.prompts.engine_blocks``). What it
writes carries the *fence* of its claim: once another one claimed the instance, or the instance's cache was forgotten
because it went down, older writes are refused.

The KV metadata then list two kinds of blocks: *confirmed* by the engine, and *booked* by placements. An engine's report
turns what was booked into what is confirmed. A booking that the engine does not confirm within ``BOOKING_MS``, or twice
that, is taken back, as long as the view is exact. A confirmed block leaves when the engine says so, never by LRU.

``names`` map the engine's own block hashes, which removals and children name, to what a subscriber knows of them. The
store keeps them, so that another subscriber continues where the last one stopped. What they contain is the subscribers'
business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, field
from enum import StrEnum
from typing import Final

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.values import value

BOOKING_MS: Final = 30_000
"""A booking counts for this long, and up to twice as long, without the engine's confirmation."""
CHANGES_PER_CALL: Final = 1000
"""Changed blocks that a call should not exceed by much: the store does nothing else meanwhile."""


class KvViewStatus(StrEnum):
    """How far the KV metadata of an instance follow its engine."""

    ESTIMATE = "estimate"
    """No events are applied: what placements booked, by LRU."""
    PARTIAL = "partial"
    """Events are applied, but some were missed: blocks that the engine held before are known as far as placements
    booked them."""
    EXACT = "exact"
    """Every event of the engine's life was applied."""


@value
class KvEventRecord:
    """How far the events of one instance were read, and by whom."""

    instance_id: str
    owner: str = ""
    """Subscriber that claims it; empty for none."""
    fence: int = 0
    status: KvViewStatus = KvViewStatus.ESTIMATE
    reason: str = ""
    """Why it is no exact view, for people."""
    sequence: int | None = None
    """Sequence of the last batch that was applied; None: none was, since the view was dropped."""
    published_s: float = 0.0
    """When the engine published that batch, by its own clock: together with the sequence it identifies the batch."""


@value
class TierChange:
    """The blocks that came to one tier behind the device, and those that left it."""

    stored: Sequence[int]
    """Fleet hashes, in the order in which they were announced."""
    removed: Sequence[int]
    most_blocks: int
    """The size of the tier: what was used longest ago leaves beyond."""


@value
class KvChange:
    """Changes that some batches of events made."""

    sequence: int
    """Sequence of the last of these batches."""
    published_s: float
    stored: Sequence[int] = ()
    """Fleet hashes of blocks that the device's cache holds now, and did not hold before."""
    removed: Sequence[int] = ()
    """The reverse. None is in both."""
    names: Mapping[bytes, bytes] = field(default_factory=dict)
    """Known facts of each engine block, by its name; empty for one that is gone."""
    all_names: bool = False
    """Whether ``names`` are all there are: names that were sent before are forgotten."""
    inner: Sequence[int] = ()
    """Blocks of a model with several cache groups that are held, and at which no hit may end
    (``scheduling.prompts.cache_groups``): those that came, and those at which one could end before. ``stored`` has the
    reverse too."""
    _: KW_ONLY
    turned: int = 0
    """How many blocks of both were held before."""
    hit_step_tokens: int = 0
    """A hit of a model with several cache groups ends at a multiple of this; 0 with one group."""
    tiers: Mapping[Tier, TierChange] = field(default_factory=dict)
