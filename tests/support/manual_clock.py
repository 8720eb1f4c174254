"""A clock that moves only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class ManualClock:
    """Time that passes only when told: sleepers and timers wake in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.naps_s: list[float] = []
        """For how long each sleeper wanted to sleep."""
        self._wakes: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def monotonic_s(self) -> float:
        return self.now_s

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    async def sleep(self, delay_s: float) -> None:
        self.naps_s.append(delay_s)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_later(delay_s, lambda: None if woken.done() else woken.set_result(None))
        await woken

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        heapq.heappush(self._wakes, (self.now_s + delay_s, next(self._order), timer.fire))
        return timer

    def jump(self, by_s: float) -> None:
        """Let time pass while no task runs, as for a suspended process."""
        self.now_s += by_s

    async def advance(self, by_s: float) -> None:
        """Let time pass, and everything that is woken by it run to its next wait."""
        until_s = self.now_s + by_s
        await settle()
        while self._wakes and self._wakes[0][0] <= until_s:
            at_s, _, wake = heapq.heappop(self._wakes)
            self.now_s = max(self.now_s, at_s)
            wake()
            await settle()
        self.now_s = max(self.now_s, until_s)
        await settle()


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


async def settle(rounds: int = 30) -> None:
    """Let every task that can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)
