"""Placements of a replica, a few at a time: each decides on loads that know of those before."""

from __future__ import annotations

import asyncio
from collections import deque

from router.deadlines import CallLater
from statestore.clock import Clock

PATIENCE_S = 0.1
"""Longest wait of one search for its turns."""
_SMOOTHING = 8
"""Turns over which the usual time between two is averaged."""


class Turns:
    """Taken before looking at the loads, passed on once the decision made from them is about to be sent.

    Requests often come in bursts. If those of a burst all looked before the first of them reserved, they would all go
    to the same instance; the reservation's own check would catch that, but only for as many rounds as it may repeat.
    A store connection serves in order, so whoever has the next turn sees the former's reservation without waiting
    for its answer: a turn is as long as a look, one round trip or two. Short prompts look together, as many as bring
    no more than the change of load that a reservation accepts unseen: they share writes and wake-ups. Other replicas
    are not waited for; the reservation's check is there for them.
    """

    def __init__(
        self, clock: Clock, call_later: CallLater, *, together_tokens: int, patience_s: float = PATIENCE_S
    ) -> None:
        self.patience_s = patience_s
        """What a search has of it for all its turns."""
        self._clock = clock
        self._call_later = call_later
        self._together_tokens = together_tokens
        self._looking = 0
        self._looking_tokens = 0
        self._usual_s = 0.0
        self._passed_at_s = 0.0
        self._waiting: deque[tuple[asyncio.Future[bool], int]] = deque()

    def take(self, prompt_tokens: int) -> bool:
        """A turn for so many tokens, if nobody is in the way; ``pass_on`` is owed for it."""
        if self._waiting or not self._fits(prompt_tokens):
            return False
        self._begin(prompt_tokens)
        return True

    async def wait(self, prompt_tokens: int, patience_s: float) -> bool:
        """Wait for a turn behind those who do already; False: go without it.

        It is False at once if those ahead would take longer than ``patience_s`` as things go: a store that is slow for
        so many requests costs some balance, but holds nobody up. Only for True ``pass_on`` is owed. A cancelled wait
        owes nothing.
        """
        if not self._waiting:
            self._passed_at_s = self._clock.monotonic_s()
        if self._usual_s * (1 + len(self._waiting)) > patience_s:
            return False
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, prompt_tokens))
        timer = self._call_later(patience_s, lambda: self._give_up(turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.pass_on(prompt_tokens)
            raise
        finally:
            timer.cancel()

    def _give_up(self, turn: asyncio.Future[bool]) -> None:
        if not turn.done():
            turn.set_result(False)

    def pass_on(self, prompt_tokens: int) -> None:
        """Give a turn of so many tokens back: to those who have waited longest, as many as fit."""
        self._looking -= 1
        self._looking_tokens -= prompt_tokens
        if not self._waiting:
            return
        now_s = self._clock.monotonic_s()
        self._usual_s += (now_s - self._passed_at_s - self._usual_s) / _SMOOTHING
        self._passed_at_s = now_s
        while self._waiting and (self._waiting[0][0].done() or self._fits(self._waiting[0][1])):
            turn, tokens = self._waiting.popleft()
            if not turn.done():
                self._begin(tokens)
                turn.set_result(True)

    def _fits(self, prompt_tokens: int) -> bool:
        return self._looking == 0 or self._looking_tokens + prompt_tokens <= self._together_tokens

    def _begin(self, prompt_tokens: int) -> None:
        self._looking += 1
        self._looking_tokens += prompt_tokens
