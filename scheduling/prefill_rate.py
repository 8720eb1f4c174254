"""The prefill rate of an instance, learned online: a decayed ratio of sums with a prior.

Every finished prefill reports its uncached tokens and the seconds the engine was busy with it: the time since
the later of the previous prefill's end and its own dispatch. Prefills that one engine batch computed together
end together, so the second reports (almost) no seconds; a ratio of sums stays right where a mean of ratios
would not. Both sums shrink by ``MEMORY_S / (MEMORY_S + busy_s)``, a decay in busy time, so idle hours forget
nothing.
"""

from __future__ import annotations

from scheduling.values import value

MEMORY_S = 30.0
"""Busy seconds that the sums remember, about."""
PRIOR_S = 2.0
"""Busy seconds that the configured rate counts for until there are samples."""
LONGEST_STALL_S = 10.0
"""Busy seconds beyond the expected time of a prefill that are counted at most. More says nothing about the rate: the
engine stood still, or the measuring clock was set forward. An hour of it would starve the instance permanently."""


@value
class PrefillRate:
    """Decayed sums of prefilled tokens and of the busy seconds they took."""

    tokens: float
    busy_s: float

    @classmethod
    def prior(cls, tokens_per_s: float) -> PrefillRate:
        """The assumption before the first prefill."""
        return cls(tokens_per_s * PRIOR_S, PRIOR_S)

    @property
    def tokens_per_s(self) -> float:
        """The learned rate; never under 1, so that it can be divided by."""
        return learned_tokens_per_s(self.tokens, self.busy_s)

    def after(self, tokens: int, busy_s: float) -> PrefillRate:
        """The sums after one more prefill of ``tokens`` uncached tokens in ``busy_s`` >= 0 seconds."""
        busy_s = min(busy_s, LONGEST_STALL_S + tokens / self.tokens_per_s)
        keep = MEMORY_S / (MEMORY_S + busy_s)
        return PrefillRate(self.tokens * keep + tokens, self.busy_s * keep + busy_s)


def learned_tokens_per_s(tokens: float, busy_s: float) -> float:
    """The rate that the two sums of a ``PrefillRate`` give."""
    return max(1.0, tokens / busy_s)


def prefill_busy_s(ended_ms: int, previous_end_ms: int, dispatched_ms: int) -> float:
    """Seconds the engine was busy with the prefill that ended just now; 0 when the clock stepped back."""
    return max(0, ended_ms - max(previous_end_ms, dispatched_ms)) / 1000
