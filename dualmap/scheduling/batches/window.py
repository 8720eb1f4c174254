"""Whether a batch will be done within its window, and what it is given where it would not be.

Lines of a batch that would be late are run as ordinary requests of their tenant, as many at a time as its window needs:
they do not wait for what interactive requests leave, and have the part of the fleet that the tenant's share gives them.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import Final

from dualmap.scheduling.batches.batch import RANGE_LINES, Batch, Status
from dualmap.scheduling.values import value

MEASURED_FOR_S: Final = 300.0
"""Time over which the rate of a batch is measured."""
MEASURED_FROM_S: Final = 120.0
"""Time after which a rate is known; of a short window a tenth."""
MARGIN: Final = 0.1
"""Part of the time that is left which a batch should not need."""
FIRST_LINE_S: Final = 30.0
"""The time that a line takes, before one was answered."""


class Delay(StrEnum):
    """Why a batch will not be done in time."""

    ROOM = "room"
    """Interactive requests leave too little room."""
    LIMITS = "limits"
    """Limits keep its lines out: those of its tenant, or full queues."""
    FAILURES = "failures"
    """Its lines fail in the fleet, and are tried again."""
    SPEED = "speed"
    """All of its lines that may run do, and are too slow."""


@value
class Outlook:
    """The forecast of a batch that runs."""

    ends_s: float | None = None
    """When it will be done at its present rate; None: it makes no progress."""
    delay: Delay | None = None
    """Why that is too late; None: it is not."""
    needed: int = 0
    """Lines that have to run at a time for it to be done in time; 0 where it will be anyway."""


class Pace:
    """The rate at which ranges of one batch are done."""

    def __init__(self) -> None:
        self._seen = deque[tuple[float, int]]()

    def note(self, now_s: float, ranges_done: int) -> None:
        """Ranges that are done, counted every now and then."""
        seen = self._seen
        seen.append((now_s, ranges_done))
        while len(seen) > 2 and seen[1][0] <= now_s - MEASURED_FOR_S:
            seen.popleft()

    def lines_per_s(self, window_s: float) -> float | None:
        """None: it was not measured for long enough, for a batch with such a window."""
        if not self._seen:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        passed_s = last_s - first_s
        return None if passed_s < min(MEASURED_FROM_S, window_s / 10) else (last - first) * RANGE_LINES / passed_s


def outlook(
    batch: Batch,
    ranges_done: int,
    lines_per_s: float | None,
    now_s: float,
    *,
    line_s: float,
    waiting: bool,
    refused: bool,
    failing: bool,
) -> Outlook:
    """The forecast of a batch at a rate.

    Args:
        line_s: the time of one line.
        waiting: lines of it wait for room.
        refused: the fleet refuses lines of it for now.
        failing: lines of it fail, and are tried again.
    """
    if batch.status is not Status.IN_PROGRESS or lines_per_s is None:
        return Outlook()
    lines, left_s = max(0, batch.lines - ranges_done * RANGE_LINES), batch.expires_s - now_s
    ends_s = now_s + lines / lines_per_s if lines_per_s > 0 else None
    if lines == 0 or (ends_s is not None and ends_s <= now_s + (1 - MARGIN) * left_s):
        return Outlook(ends_s)
    needed = math.ceil(lines * line_s / max(line_s, (1 - MARGIN) * left_s))
    causes = ((Delay.FAILURES, failing), (Delay.LIMITS, refused), (Delay.ROOM, waiting))
    delay = next((cause for cause, holds in causes if holds), Delay.SPEED)
    return Outlook(ends_s, delay, needed)
