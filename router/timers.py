"""Timers of the event loop, as an argument: tests fire them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], TimerHandle]
"""``call_later(delay_s, callback)``; the event loop's own heap holds them, no task per request."""


def prefill_delay_s(tokens_ahead: int, uncached_tokens: int, prefill_tokens_per_s: float) -> float:
    """When a dispatched request is expected to have its first token, seconds from dispatch."""
    return (tokens_ahead + uncached_tokens) / max(1.0, prefill_tokens_per_s)
