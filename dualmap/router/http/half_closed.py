"""A client that has closed its sending half: it waits for its answer, or it has left. Only bytes sent to it show which:
one that has left answers them with a reset, and the next write fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

PROBE_DELAYS_S: Final = (0.0, 0.05, 0.2, 1.0)
"""Pauses between probes. A client that has left is detected by the second probe, or a later one if it is distant."""


class DepartureProbes:
    """Calls ``probe`` now and a few times more, until it is stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, probe: Callable[[], None]) -> None:
        self._loop = loop
        self._probe = probe
        self._delays_s = iter(PROBE_DELAYS_S)
        self._timer: asyncio.TimerHandle | None = None
        self._schedule()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        delay_s = next(self._delays_s, None)
        self._timer = self._loop.call_later(delay_s, self._fire) if delay_s is not None else None

    def _fire(self) -> None:
        self._probe()
        self._schedule()
