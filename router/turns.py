"""Placements of a replica, one after the other: each decides on loads that know of the one before."""

from __future__ import annotations

import asyncio
from collections import deque

from router.deadlines import CallLater

PATIENCE_S = 0.25
"""Longest wait for a turn: a store that answers slowly may cost some balance, but not hold everybody up."""


class Turns:
    """Taken before looking at the loads, passed on once the decision made from them is about to be sent.

    Requests often come in bursts. If those of a burst all looked before the first of them reserved, they would all go
    to the same instance; the reservation's own check would catch that, but only for as many rounds as it may repeat.
    A store connection serves in order, so whoever has the next turn sees the former's reservation without waiting
    for its answer: a turn lasts one round trip. Other replicas are not waited for; the reservation's check is there
    for them.
    """

    def __init__(self, call_later: CallLater, patience_s: float = PATIENCE_S) -> None:
        self._call_later = call_later
        self._patience_s = patience_s
        self._taken = False
        self._waiting: deque[asyncio.Future[bool]] = deque()

    def take(self) -> bool:
        """The turn, if nobody has it; ``pass_on`` is owed for it."""
        free, self._taken = not self._taken, True
        return free

    async def wait(self) -> bool:
        """Wait for the turn behind those who do already; False: patience ran out, go without it.

        Only for True ``pass_on`` is owed. A cancelled wait owes nothing.
        """
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        timer = self._call_later(self._patience_s, lambda: None if turn.done() else turn.set_result(False))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.pass_on()
            raise
        finally:
            timer.cancel()

    def pass_on(self) -> None:
        """Give the turn to whoever has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._taken = False
