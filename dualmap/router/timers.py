"""Timers of the event loop, as an argument: tests fire them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], TimerHandle]
"""``call_later(delay_s, callback)``; the event loop's own heap holds them, no task per request."""
