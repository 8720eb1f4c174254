"""Time as an interface: code that waits takes a Clock, so tests and simulations can jump."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and waiting. Never used for shared timestamps: those come from the store."""

    def monotonic_s(self) -> float: ...

    async def sleep(self, delay_s: float) -> None: ...


class RealClock:
    """The machine's own clock and the event loop's timer."""

    monotonic_s = staticmethod(time.monotonic)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
