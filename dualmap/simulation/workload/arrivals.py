"""Decides when the requests of a trace are sent: at its own times, or as answers end.

* Open loop: every request at the trace's own time, whatever becomes of the others.
* Sessions: a request with a think time (``TraceRequest.think_s``) comes so long after the answers that it waits for
  have ended: that of its session before it, and those of the sessions in ``after``. The others come at their times.
* Clients: a fixed number of clients, each of which plays one session after the other and is idle only while it thinks.
  A request without a session is a session of its own, so that such clients are always busy.
* Lines of batches: requests of one priority class that come as there is room, each instance beginning at another part
  of them, until the last of the others has come; all of them where there are no others.

An answer that failed or was refused ends a turn as well. Nothing here waits or knows a clock: a replay drives it in
real time and a simulation in virtual time. All times are those of the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from dualmap.scheduling.batches.slack import next_range
from dualmap.simulation.workload.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Loop:
    """The rule by which requests follow each other."""

    concurrency: int | None = None
    """Number of clients; None: sessions begin at the trace's own times."""
    open: bool = False
    """Send every request at its own time, also where the trace has think times. Excludes ``concurrency``."""
    seconds: float = inf
    """Nothing is sent later than so long after the first request."""
    lines: str = ""
    """The priority class whose requests are lines of batches; empty: there are none."""
    lines_at_once: int | None = None
    """Lines that are kept under way, whatever else comes; None: as many as there is room for."""

    def is_closed(self, trace: Trace) -> bool:
        """Whether any request of the trace waits for an answer."""
        return self.concurrency is not None or (not self.open and trace.has_think_times)


TRACE_TIMES = Loop()
"""The trace's own times and think times, to the end."""


class Arrivals:
    """The requests of one run that are still to be sent, by their places in the trace."""

    def __init__(self, trace: Trace, loop: Loop) -> None:
        self._requests = trace.requests
        self.first_s = trace.requests[0].arrival_s if trace.requests else 0.0
        """The time of the first request."""
        self._end_s = self.first_s + loop.seconds
        self._due: list[tuple[float, int]] = []
        """A heap of (time, place)."""
        self._in_flight = 0
        self._followers: dict[int, list[int]] = {}
        self._missing: dict[int, int] = {}
        """The number of answers that a request waits for."""
        self._lines: list[int] = []
        self.lines_under_way = 0
        if loop.lines:
            self._lines.extend(place for place, each in enumerate(trace.requests) if each.priority == loop.lines)
        self._all_lines = len(self._lines)
        self._free_lines = list(range(self._all_lines))
        self._left = len(self._requests) - len(self._lines)
        """The number of requests that are no lines and have not been sent."""
        self._only_lines = self._all_lines > 0 and self._left == 0
        self._link(loop)
        self._clients: _Clients | None = None
        apart = {*self._missing, *self._lines}
        roots = [place for place in range(len(self._requests)) if place not in apart]
        if loop.concurrency is None:
            self._due = [(due_s, place) for place in roots if (due_s := self._requests[place].arrival_s) < self._end_s]
        else:
            self._clients = _Clients(len(self._requests), self._followers)
            for _ in range(loop.concurrency):
                self._begin_session(self.first_s)

    def _link(self, loop: Loop) -> None:
        """Find out which requests wait for which answers."""
        if loop.open:
            return
        latest: dict[str, int] = {}
        for place, request in enumerate(self._requests):
            if request.think_s is not None or (loop.concurrency is not None and request.session):
                before = {latest[name] for name in (request.session, *request.after) if name in latest}
                for other in before:
                    self._followers.setdefault(other, []).append(place)
                if before:
                    self._missing[place] = len(before)
            if request.session:
                latest[request.session] = place

    @property
    def due_s(self) -> float | None:
        """The time of the next request; None: none before an answer ends, or none at all."""
        return self._due[0][0] if self._due else None

    @property
    def over(self) -> bool:
        """Whether nothing more will be sent: lines only as long as something else is, unless there are only lines."""
        if self._only_lines:
            return not self._free_lines and self._in_flight == 0
        return not self._due and (self._in_flight == 0 or self._left == 0)

    @property
    def known(self) -> Sequence[int]:
        """The places whose time is known, roughly in the order of their times."""
        return [place for _, place in self._due]

    def followers(self, place: int) -> Sequence[int]:
        """The places that wait for the answer to this one."""
        return self._followers.get(place, ())

    def is_cut_off(self, place: int, now_s: float) -> bool:
        """Whether the load ends before anything follows this answer, which ends now."""
        followers = self.followers(place)
        return bool(followers) and all(now_s + _think_s(self._requests[each]) >= self._end_s for each in followers)

    def take(self) -> int:
        """The place of the next request, which is sent now."""
        self._left -= 1
        self._in_flight += 1
        return heappop(self._due)[1]

    def take_line(self, place: int = 0, places: int = 1) -> int | None:
        """The place of the next line, which is sent now to one of so many instances; None: there is none, or nothing
        else comes any more."""
        if not self._free_lines or self.over:
            return None
        self._in_flight += 1
        self.lines_under_way += 1
        return self._lines[self._free_lines.pop(next_range(self._free_lines, self._all_lines, place, places))]

    def line_ended(self) -> None:
        """One of the lines that were taken has ended; ``ended`` is called for it, too."""
        self.lines_under_way -= 1

    def ended(self, place: int, now_s: float) -> bool:
        """The answer to a request that was taken has ended; returns whether another one's time is known by that."""
        self._in_flight -= 1
        known = len(self._due)
        for follower in self._followers.get(place, ()):
            self._missing[follower] -= 1
            if self._missing[follower] == 0:
                self._set(now_s + _think_s(self._requests[follower]), follower)
        if self._clients is not None and self._clients.is_idle_after(place):
            self._begin_session(now_s)
        return len(self._due) > known

    def _begin_session(self, now_s: float) -> None:
        """An idle client takes the next session, if there is one."""
        assert self._clients is not None  # called where there are clients only
        for place in self._clients.next_session():
            self._set(now_s, place)

    def _set(self, due_s: float, place: int) -> None:
        if due_s < self._end_s:
            heappush(self._due, (due_s, place))


def _think_s(request: TraceRequest) -> float:
    return request.think_s or 0.0


class _Clients:
    """The sessions that clients play. Those that wait for each other are played by one client as one session."""

    def __init__(self, requests: int, followers: dict[int, list[int]]) -> None:
        self._session = list(range(requests))
        """The first place of each place's session."""
        self._join(followers)
        waiting = {follower for each in followers.values() for follower in each}
        beginnings: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}
        """The number of answers of a session that have not ended."""
        for place, session in enumerate(self._session):
            self._left[session] = self._left.get(session, 0) + 1
            if place not in waiting:
                beginnings.setdefault(session, []).append(place)
        self._unplayed = deque(beginnings.values())

    def _join(self, followers: dict[int, list[int]]) -> None:
        """Give all places that are linked the session of the first of them."""

        def first(place: int) -> int:
            while self._session[place] != place:
                self._session[place] = self._session[self._session[place]]
                place = self._session[place]
            return place

        for place, each in followers.items():
            for follower in each:
                one, other = sorted((first(place), first(follower)))
                self._session[other] = one
        for place in range(len(self._session)):
            self._session[place] = first(place)

    def next_session(self) -> Sequence[int]:
        """The places with which the next session begins; empty: all were begun."""
        return self._unplayed.popleft() if self._unplayed else ()

    def is_idle_after(self, place: int) -> bool:
        """Count the answer to this place as ended; returns whether that ends the session."""
        self._left[self._session[place]] -= 1
        return self._left[self._session[place]] == 0
