"""A cumulative sum (CUSUM) of the work that arrives beyond a reference, never below 0. It tells an overload from a
burst.

CUSUM: Page, Biometrika 41, 1954.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

TROUGH_S = 4.0
"""Time for which the sum has to stay above 0; a shorter excess is one burst."""
MIN_MEAN_S = 10.0
"""Shortest window of the mean load: bursts of seconds tell little of the size."""


@dataclass(slots=True)
class Cusum:
    """Work beyond a reference since the sum was last 0."""

    excess_s: float = 0.0
    elapsed_s: float = 0.0
    work_s: float = 0.0
    _recent: deque[tuple[float, float]] = field(default_factory=deque)
    """Times and sums of the last looks."""

    def add(self, at_s: float, elapsed_s: float, work_s: float, reference: float) -> None:
        """``reference`` is in instances' worth of work."""
        self.excess_s += work_s - elapsed_s * reference
        if self.excess_s <= 0:
            self.excess_s = self.elapsed_s = self.work_s = 0.0
        else:
            self.elapsed_s, self.work_s = self.elapsed_s + elapsed_s, self.work_s + work_s
        self._recent.append((at_s, self.excess_s))
        while at_s - self._recent[0][0] > TROUGH_S:
            self._recent.popleft()

    @property
    def load(self) -> float:
        """Instances' worth of work that arrives since the sum left 0, or within ``MIN_MEAN_S`` if that is longer."""
        return self.work_s / max(MIN_MEAN_S, self.elapsed_s)

    def trough_s(self, at_s: float) -> float:
        """The least sum of the last looks; 0 before they span ``TROUGH_S``."""
        if at_s - self._recent[0][0] < TROUGH_S - 1:
            return 0.0
        return min(excess_s for _, excess_s in self._recent)
