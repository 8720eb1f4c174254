"""The TTFT deadlines of a replica's live requests: each is reported when it passes, by one timer for all of them.

A request pays for one entry in a heap. An entry whose request has been judged is emptied, so that it keeps nothing of
the request, and leaves the heap when its time comes.
"""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, Protocol

from dualmap.router.timers import CallLater, TimerHandle
from dualmap.runtime.clock import Clock
from dualmap.scheduling.values import record

_LEAST_PAUSE_S: Final = 0.02
"""Deadlines that pass one soon after the other are reported together."""
_FEWEST_SWEPT: Final = 4096
"""Entries before those that are empty are removed: an SLO of hours would keep many."""


class HasDeadline(Protocol):
    """A request that is to hear of its deadline."""

    def deadline_passed(self) -> None: ...


@record
class Deadline:
    """A deadline of a live request."""

    request: HasDeadline | None

    def forget(self) -> None:
        """Stop reporting to the request."""
        self.request = None


class Deadlines:
    """Reports deadlines as they pass."""

    def __init__(self, clock: Clock, call_later: CallLater) -> None:
        self._now_s = clock.monotonic_s
        self._call_later = call_later
        self._heap: list[tuple[float, int, Deadline]] = []
        """With their times, and a number that orders those of one time."""
        self._numbers = itertools.count()
        self._timer: TimerHandle | None = None
        self._fires_at_s = inf
        self._most = _FEWEST_SWEPT

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: HasDeadline, at_s: float) -> Deadline:
        """Report this time, once it has passed, to the request, unless ``Deadline.forget`` comes first."""
        deadline, heap = Deadline(request), self._heap
        heappush(heap, (at_s, next(self._numbers), deadline))
        if at_s < self._fires_at_s:
            self._arm(at_s)
        if len(heap) > self._most:
            self._sweep()
        return deadline

    def report(self) -> None:
        """Report what has passed by now. The timer does so on its own; a reader of counts calls it to be exact."""
        heap, now_s = self._heap, self._now_s()
        while heap and (heap[0][0] <= now_s or heap[0][2].request is None):
            deadline = heappop(heap)[2]
            request, deadline.request = deadline.request, None
            if request is not None:
                request.deadline_passed()

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at_s = at_s
        self._timer = self._call_later(max(_LEAST_PAUSE_S, at_s - self._now_s()), self._fire)

    def _fire(self) -> None:
        self._timer, self._fires_at_s = None, inf
        self.report()
        if self._heap:
            self._arm(self._heap[0][0])

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[2].request is not None]
        heapify(self._heap)
        self._most = max(_FEWEST_SWEPT, 2 * len(self._heap))
