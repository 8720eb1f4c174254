"""Work assigned to an instance recently: an exponentially decayed sum.

Source: Preble (ICLR 2025), which sums the prefill work of a three-minute window per GPU. Exponential decay
with the window's length as time constant holds the same mass under steady load and needs two numbers instead of
a list.
"""

from __future__ import annotations

from math import exp

from dualmap.scheduling.values import value

WINDOW_MS = 180_000
"""Time constant of the decay: Preble's history window."""


@value
class LoadWindow:
    """Tokens of prefill work as of ``at_ms`` of the store's clock."""

    tokens: float = 0.0
    at_ms: int = 0

    def read(self, now_ms: int) -> float:
        """The decayed sum now; a clock that stepped back decays nothing."""
        return decayed_tokens(self.tokens, self.at_ms, now_ms)

    def add(self, now_ms: int, tokens: int) -> LoadWindow:
        """The window after ``tokens`` more uncached tokens were assigned, as of a clock that may have stepped back."""
        return LoadWindow(self.read(now_ms) + tokens, now_ms)


def decayed_tokens(tokens: float, at_ms: int, now_ms: int) -> float:
    """The part of a sum of tokens as of ``at_ms`` that is left now."""
    return tokens * exp(-max(0, now_ms - at_ms) / WINDOW_MS)
