"""The prefill rate of an instance: tokens per second where prefills queue. Learned from first tokens.

An engine computes in steps under a token budget. Prefills keep it busy for

    step_s · steps in which prefills end + token_s · uncached tokens

as those steps are not full; what full steps cost whatever they compute is a part of ``token_s``. A ratio of tokens and
seconds would take the one for the other, and follow the size of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scheduling.instance import InstanceLoad
from scheduling.ridge import Ridge
from scheduling.values import value

LEAST_TOKENS = 512
"""For each step in which prefills end. Fewer teach nothing of the rate: an engine computes them in about the time in
which it reads the weights, which accelerators break even with at 200 to 400 tokens."""
MEMORY_S = 30.0
"""Busy seconds that are remembered, about. Idle hours and what teaches nothing forget nothing."""
LONGEST_STALL_S = 10.0
"""Busy seconds beyond the expected time of a prefill that are counted at most. More says nothing about the rate: the
engine stood still, or the measuring clock was set forward. An hour of it would starve the instance permanently."""
VARIANCE_S = 0.05
"""Of a busy time, per second of it: it adds up, step by step. So the times that are expected add up to those seen, and
those of an engine that now and then decodes for seconds count in full."""

PRIOR_STEP_SHARE, PRIOR_STEP_S = 0.1, 0.025
"""Fixed cost of a step before anything is learned: this share of a full step, and no more than so much."""
PRIOR_ERRORS = (1.0, 2.0)
"""Usual errors of the prior's step and token costs, as shares. The rate is a guess or a default more often than not."""
LEAST_SHARE = 0.02
"""Of the prior's cost of a token that is believed at least."""
MOST_STEP_TOKENS = 16_384
"""Token budget that is believed at most; a dispatch window without a limit tells none."""
MOST_STEPS = 8
"""Full steps that are taken together. What the edges take from others, and give to them, is little against so many."""
SAME_STEP_MS = 8
"""First tokens that come so close were computed in one step; less than a step takes."""


@value
class BusyTime:
    """Prefills that followed each other without a gap.

    An engine is busy with a prefill from the later of its dispatch and the former one's end. Prefills that one step
    computed together end together, and one that ends leaves a part of its last step to the next: only together they
    have their right time.
    """

    tokens: int
    """Uncached."""
    ends: int
    """Steps in which prefills ended."""
    began_ms: int
    ended_ms: int

    def with_next(self, other: BusyTime) -> BusyTime:
        """Both together; ``other`` begins where this one ends."""
        same_step = other.ended_ms - self.ended_ms <= SAME_STEP_MS
        ends = self.ends + (0 if same_step else other.ends)
        return BusyTime(self.tokens + other.tokens, ends, self.began_ms, other.ended_ms)


@value
class PrefillRate:
    """What one instance has taught so far."""

    step_tokens: float
    """Token budget of a step."""
    costs: Ridge
    """``step_s`` and ``token_s``."""

    @classmethod
    def prior(cls, load: InstanceLoad) -> PrefillRate:
        """What is believed before the first prefill: the instance's present rate."""
        step_tokens = min(max(1.0, load.dispatch_window_tokens / 2), MOST_STEP_TOKENS)
        mean_s = 1.0 / load.prefill_tokens_per_s
        step_s = min(PRIOR_STEP_SHARE * mean_s * step_tokens, PRIOR_STEP_S)
        token_s = mean_s - step_s / step_tokens
        errors = PRIOR_ERRORS[0] * step_s, PRIOR_ERRORS[1] * token_s
        return cls(step_tokens, Ridge.of((step_s, token_s), errors, (0.0, LEAST_SHARE * token_s)))

    @property
    def tokens_per_s(self) -> float:
        """The learned rate; never under 1, so that it can be divided by."""
        step_s, token_s = self.costs.weights
        return max(1.0, 1.0 / (token_s + step_s / self.step_tokens))

    def after(self, times: Iterable[BusyTime]) -> PrefillRate:
        """The rate after some more prefills, in order."""
        costs, together = self.costs, None
        for time in times:
            if together is None:
                together = time
            elif self._goes_on(together, time):
                together = together.with_next(time)
            else:
                costs, together = _with(costs, together), time
        return replace(self, costs=_with(costs, together).solved()) if together is not None else self

    def _goes_on(self, time: BusyTime, other: BusyTime) -> bool:
        """Whether the other one followed without a gap, and there is room for it."""
        if other.began_ms != time.ended_ms:
            return False
        return time.tokens < MOST_STEPS * self.step_tokens or other.ended_ms - time.ended_ms <= SAME_STEP_MS


def _with(costs: Ridge, time: BusyTime) -> Ridge:
    if time.tokens < LEAST_TOKENS * time.ends:
        return costs
    features = float(time.ends), float(time.tokens)
    expected_s = costs.expected(features)
    busy_s = min((time.ended_ms - time.began_ms) / 1000, expected_s + LONGEST_STALL_S)
    usual_error, keep = (VARIANCE_S * expected_s) ** 0.5, MEMORY_S / (MEMORY_S + busy_s)
    return costs.observed(features, busy_s, usual_error=usual_error, keep=keep)
