"""The position of a subscriber in the sequence of one engine's batches. Pure.

Sequence numbers begin at 0 when an engine starts. So a number says nothing by itself: the engine may have started again
meanwhile. A batch is identified by its number and the time at which it was published.
"""

from __future__ import annotations

from enum import StrEnum

from dualmap.scheduling.values import value


class BatchOrder(StrEnum):
    """The order of a batch that arrived, relative to those before it."""

    NEXT = "next"
    OLD = "old"
    """The batch was applied before."""
    GAP = "gap"
    """Batches before it are missing."""
    RESTART = "restart"
    """The engine counts from the beginning."""


@value
class Position:
    """The last batch that was applied. ``sequence`` -1: none was published before."""

    sequence: int
    published_s: float

    def order_of(self, sequence: int, published_s: float) -> BatchOrder:
        if sequence <= self.sequence:
            return BatchOrder.RESTART if published_s > self.published_s else BatchOrder.OLD
        return BatchOrder.NEXT if sequence == self.sequence + 1 else BatchOrder.GAP


BEGINNING = Position(-1, 0.0)
