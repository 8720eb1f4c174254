"""How many placements of a replica decide at once: each decides on loads that know of those before."""

from __future__ import annotations

import asyncio
from collections import deque

from router.timers import CallLater
from statestore.clock import Clock

MAX_WAIT_S = 0.1
"""Longest wait of one search for its slots."""
_SMOOTHING = 8
"""Slots over which the usual time between two is averaged."""


class PlacementLimiter:
    """A slot is acquired before looking at the loads, and released once the decision made from them is about to be
    sent.

    Requests often come in bursts. If those of a burst all looked before the first of them reserved, they would all go
    to the same instance; the reservation's own check would catch that, but only for as many rounds as it may repeat.
    A store connection serves in order, so whoever has the next slot sees the former's reservation without waiting
    for its answer: a slot is held for a look, one round trip or two. Short prompts look together, as many as bring
    no more than the change of load that a reservation accepts unseen: they share writes and wake-ups. Other replicas
    are not waited for; the reservation's check is there for them.
    """

    def __init__(
        self, clock: Clock, call_later: CallLater, *, together_tokens: int, max_wait_s: float = MAX_WAIT_S
    ) -> None:
        self.max_wait_s = max_wait_s
        """What a search waits for all its slots at most."""
        self._clock = clock
        self._call_later = call_later
        self._together_tokens = together_tokens
        self._looking = 0
        self._looking_tokens = 0
        self._usual_s = 0.0
        self._released_at_s = 0.0
        self._waiting: deque[tuple[asyncio.Future[bool], int]] = deque()

    def try_acquire(self, prompt_tokens: int) -> bool:
        """A slot for so many tokens, if nobody is in the way; ``release`` is owed for it."""
        if self._waiting or not self._fits(prompt_tokens):
            return False
        self._begin(prompt_tokens)
        return True

    async def acquire(self, prompt_tokens: int, max_wait_s: float) -> bool:
        """Wait for a slot behind those who do already; False: go without it.

        It is False at once if those ahead would take longer than ``max_wait_s`` as things go: a store that is slow for
        so many requests costs some balance, but holds nobody up. Only for True ``release`` is owed. A cancelled wait
        owes nothing.
        """
        if not self._waiting:
            self._released_at_s = self._clock.monotonic_s()
        if self._usual_s * (1 + len(self._waiting)) > max_wait_s:
            return False
        slot: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((slot, prompt_tokens))
        timer = self._call_later(max_wait_s, lambda: self._give_up(slot))
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.result():
                self.release(prompt_tokens)
            raise
        finally:
            timer.cancel()

    def _give_up(self, slot: asyncio.Future[bool]) -> None:
        if not slot.done():
            slot.set_result(False)

    def release(self, prompt_tokens: int) -> None:
        """Give a slot of so many tokens back: to those who have waited longest, as many as fit."""
        self._looking -= 1
        self._looking_tokens -= prompt_tokens
        if not self._waiting:
            return
        now_s = self._clock.monotonic_s()
        self._usual_s += (now_s - self._released_at_s - self._usual_s) / _SMOOTHING
        self._released_at_s = now_s
        while self._waiting and (self._waiting[0][0].done() or self._fits(self._waiting[0][1])):
            slot, tokens = self._waiting.popleft()
            if not slot.done():
                self._begin(tokens)
                slot.set_result(True)

    def _fits(self, prompt_tokens: int) -> bool:
        return self._looking == 0 or self._looking_tokens + prompt_tokens <= self._together_tokens

    def _begin(self, prompt_tokens: int) -> None:
        self._looking += 1
        self._looking_tokens += prompt_tokens
