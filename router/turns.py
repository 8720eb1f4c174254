"""Placements of a replica, one after the other: each decides on loads that know of the one before."""

from __future__ import annotations

import asyncio
from collections import deque

from router.deadlines import CallLater
from statestore.clock import Clock

PATIENCE_S = 0.1
"""Longest wait of one search for its turns."""
_SMOOTHING = 8
"""Turns over which the usual length of a turn is averaged."""


class Turns:
    """Taken before looking at the loads, passed on once the decision made from them is about to be sent.

    Requests often come in bursts. If those of a burst all looked before the first of them reserved, they would all go
    to the same instance; the reservation's own check would catch that, but only for as many rounds as it may repeat.
    A store connection serves in order, so whoever has the next turn sees the former's reservation without waiting
    for its answer: a turn is as long as a look, one round trip or two. Other replicas are not waited for; the
    reservation's check is there for them.
    """

    def __init__(self, clock: Clock, call_later: CallLater, patience_s: float = PATIENCE_S) -> None:
        self.patience_s = patience_s
        """What a search has of it for all its turns."""
        self._clock = clock
        self._call_later = call_later
        self._taken = False
        self._taken_at_s = 0.0
        self._usual_s = 0.0
        self._waiting: deque[asyncio.Future[bool]] = deque()

    def take(self) -> bool:
        """The turn, if nobody has it; ``pass_on`` is owed for it."""
        if self._taken:
            return False
        self._begin()
        return True

    async def wait(self, patience_s: float) -> bool:
        """Wait for the turn behind those who do already; False: go without it.

        It is False at once if those ahead would take longer than ``patience_s`` as things go: a store that is slow for
        so many requests costs some balance, but holds nobody up. Only for True ``pass_on`` is owed. A cancelled wait
        owes nothing.
        """
        if self._usual_s * (1 + len(self._waiting)) > patience_s:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        timer = self._call_later(patience_s, lambda: self._give_up(turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.pass_on()
            raise
        finally:
            timer.cancel()

    def _give_up(self, turn: asyncio.Future[bool]) -> None:
        if not turn.done():
            turn.set_result(False)

    def pass_on(self) -> None:
        """Give the turn to whoever has waited longest."""
        self._usual_s += (self._clock.monotonic_s() - self._taken_at_s - self._usual_s) / _SMOOTHING
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._begin()
                turn.set_result(True)
                return
        self._taken = False

    def _begin(self) -> None:
        self._taken = True
        self._taken_at_s = self._clock.monotonic_s()
