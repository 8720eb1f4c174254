"""A run: one engine step, or many decode steps in a row that differ only by the growing context."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from dualmap.simulation.engine.sequence import EngineSequence


@dataclass(slots=True)
class Run:
    """Step k takes ``first_s + (k - 1) · growth_s``. All times are computed from the start, so cutting the run
    short or settling a part of it moves no other step."""

    start_s: float
    steps: int
    first_s: float
    growth_s: float
    _: KW_ONLY
    first_step: int
    """Number of the last step before the run, as the decode batch counts."""
    prefilled: tuple[EngineSequence, ...] = ()
    """Sequences whose prompt this (single) step completes."""
    done: int = 0
    """Steps already accounted for."""
    decodes: bool = True
    """Whether the batch generates a token in each step."""

    def end_s(self, step: int) -> float:
        """When the step ends (1 is the first; 0 gives the start)."""
        return self.start_s + step * self.first_s + self.growth_s * (step * (step - 1) // 2)

    def steps_by(self, now_s: float) -> int:
        """How many steps have ended at ``now_s``, that moment included."""
        if self.end_s(self.steps) <= now_s:
            return self.steps
        elapsed_s = now_s - self.start_s
        if elapsed_s < self.first_s:
            guess = 0
        elif self.growth_s == 0.0:
            guess = int(elapsed_s / self.first_s)
        else:
            half = self.first_s - self.growth_s / 2
            guess = int((math.sqrt(half * half + 2 * self.growth_s * elapsed_s) - half) / self.growth_s)
        # The closed form may be off by one through rounding; the definition decides.
        guess = max(0, min(guess, self.steps - 1))
        while guess < self.steps - 1 and self.end_s(guess + 1) <= now_s:
            guess += 1
        while guess > 0 and self.end_s(guess) > now_s:
            guess -= 1
        return guess
