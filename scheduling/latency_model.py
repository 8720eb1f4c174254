"""Learning an instance's times from its first tokens, one sample at a time.

Two ridge regressions (``scheduling.ridge``): one of the time in which the engine was busy (``scheduling.busy_time``),
one of the wait before it. Errors count relative to the times, and an error beyond the usual has the weight that makes
it teach no more than the usual would (Huber's weights). So a standstill teaches little, and so do requests that waited
for KV memory or whose instance was given others before their first token: most large errors are of these kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import isfinite

from scheduling.busy_time import BusyTime, PrefillSample
from scheduling.instance import InstanceSpec
from scheduling.latency import Latency, TtftParts
from scheduling.ridge import RidgePrior, RidgeSums
from scheduling.values import value

LEAST_TOKENS = 512
"""For each end. Fewer teach nothing of the rate: an engine computes them in about the time in which it reads the
weights, which accelerators break even with at 200 to 400 tokens."""
MEMORY_S = 30.0
"""Seconds of prefill that are remembered, about. Idle hours and what teaches nothing forget nothing."""
WAITING_KEEP = 0.98
"""Of the weight of every former wait at each new one: about fifty are remembered."""
PRIOR_TOKENS = 2000.0
"""Tokens that count as prefilled before the first, for what is typical."""

PRIOR_ERRORS = (1.0, 2.0, 1.0, 1.0)
"""Usual errors of a prior's step, token, pair and context costs, as shares of them. The rate is a guess or a default
more often than not."""
MOST_TIMES, LEAST_SHARE = 100.0, 0.02
"""Of a prior's costs: what is learned is at most so many times as much, and of the token's at least this share."""

BUSY_ERROR_S, BUSY_ERROR_SHARE = 0.03, 0.1
"""Usual error of a busy time: a constant, for the steps at its edges, and a share of it."""
WAITING_ERROR_S, WAITING_ERROR_SHARE = 0.03, 0.2
"""Likewise of a TTFT: what comes after a request decides much of it."""


@value
class PrefillSums:
    """Busy times observed, and what is typical of them."""

    ridge: RidgeSums
    """Features: ends, tokens, pairs, and steps times running context."""
    tokens: float
    """Of recent prefills; decayed as the ridge's sums."""
    pairs: float
    context_tokens: float
    """Running context, once for each of ``tokens``."""

    def after(self, busy: BusyTime, latency: Latency) -> PrefillSums:
        """The sums after one more busy time, of which ``latency`` expects something."""
        if busy.tokens < LEAST_TOKENS * busy.ends or not busy.ends:
            return self
        context_tokens = busy.context_tokens / busy.tokens
        # A prefill waits for half of the step under way, and fills half of its last.
        steps = (1.0 + busy.ends) / 2 + busy.tokens / latency.step_tokens
        features = (float(busy.ends), float(busy.tokens), busy.pairs, steps * context_tokens)
        expected_s = _dot(features, _prefill_weights(latency))
        error_s = BUSY_ERROR_S + BUSY_ERROR_SHARE * max(busy.busy_s, expected_s)
        keep = MEMORY_S / (MEMORY_S + expected_s)
        return PrefillSums(
            self.ridge.after(features, busy.busy_s, certainty=_certainty(error_s, busy.busy_s - expected_s), keep=keep),
            self.tokens * keep + busy.tokens,
            self.pairs * keep + busy.pairs,
            self.context_tokens * keep + busy.context_tokens,
        )


@value
class LatencyModel:
    """What one instance has taught so far. Replicas need its ``latency`` alone."""

    prior: Latency
    latency: Latency
    """What is known now."""
    busy: BusyTime
    """The latest busy time, which may grow: ``latency`` knows of it, ``prefill`` does not."""
    prefill: PrefillSums
    waiting: RidgeSums
    """Of TTFTs. Features: seconds of queueing and of joining, one, running context."""

    @classmethod
    def of(cls, spec: InstanceSpec) -> LatencyModel:
        """The model before the first sample."""
        prior = Latency.prior(spec)
        prefill = PrefillSums(RidgeSums.empty(4), PRIOR_TOKENS, PRIOR_TOKENS * prior.pairs_per_token, 0.0)
        return cls(prior, prior, BusyTime(), prefill, RidgeSums.empty(4))

    @classmethod
    def from_floats(cls, spec: InstanceSpec, floats: Sequence[float]) -> LatencyModel:
        """The model that ``floats`` gave. Raises ValueError if they are not as many, or not finite."""
        new = cls.of(spec)
        if len(floats) != len(new.floats()) or not all(map(isfinite, floats)):
            raise ValueError(f"a latency model has {len(new.floats())} finite numbers, not {list(floats)}")
        rest = iter(floats)
        latency = Latency.from_floats(list(islice(rest, len(new.latency.floats()))))
        busy = BusyTime.from_floats(list(islice(rest, len(new.busy.floats()))))
        ridge = RidgeSums.from_floats(4, list(islice(rest, 20)))
        prefill = PrefillSums(ridge, next(rest), next(rest), next(rest))
        return cls(new.prior, latency, busy, prefill, RidgeSums.from_floats(4, list(rest)))

    def floats(self) -> tuple[float, ...]:
        """All of it but the prior."""
        prefill = self.prefill
        return (
            *self.latency.floats(),
            *self.busy.floats(),
            *prefill.ridge.floats(),
            prefill.tokens,
            prefill.pairs,
            prefill.context_tokens,
            *self.waiting.floats(),
        )

    def described_by(self, spec: InstanceSpec) -> LatencyModel:
        """The same experience with the prior of another description."""
        prior = Latency.prior(spec)
        if prior == self.prior:
            return self
        latency = _latency(prior, self.latency, self.prefill.after(self.busy, self.latency), self.waiting)
        return replace(self, prior=prior, latency=latency)

    def after(self, sample: PrefillSample) -> LatencyModel:
        """The model after one more first token. O(1)."""
        waiting = self.waiting if sample.parts is None else self._after_wait(sample.ttft_ms / 1000, sample.parts)
        prefill, busy = self.prefill, BusyTime.of(sample)
        if self.busy.continues_in(sample, self.prior.step_tokens):
            busy = self.busy.with_next(busy)
        else:
            prefill = prefill.after(self.busy, self.latency)
        latency = _latency(self.prior, self.latency, prefill.after(busy, self.latency), waiting)
        return LatencyModel(self.prior, latency, busy, prefill, waiting)

    def _after_wait(self, ttft_s: float, parts: TtftParts) -> RidgeSums:
        expected_s = self.latency.expected_ttft_s(parts)
        error_s = WAITING_ERROR_S + WAITING_ERROR_SHARE * max(ttft_s, expected_s)
        return self.waiting.after(
            (parts.queueing_ms / 1000, parts.joining_ms / 1000, 1.0, float(parts.context_tokens)),
            ttft_s - parts.compute_ms / 1000,
            certainty=_certainty(error_s, ttft_s - expected_s),
            keep=WAITING_KEEP,
        )


def _latency(prior: Latency, former: Latency, prefill: PrefillSums, waiting: RidgeSums) -> Latency:
    step_s, token_s, pair_s, context_token_s = _prefill_prior(prior).weights_after(
        prefill.ridge, _prefill_weights(former)
    )
    queueing_weight, joining_weight, waiting_s, waiting_context_s = _waiting_prior(prior).weights_after(
        waiting, _waiting_weights(former)
    )
    return Latency(
        prior.step_tokens,
        step_s,
        token_s,
        pair_s,
        context_token_s,
        prefill.pairs / prefill.tokens,
        prefill.context_tokens / prefill.tokens,
        queueing_weight,
        joining_weight,
        waiting_s,
        waiting_context_s,
    )


def _prefill_weights(latency: Latency) -> tuple[float, ...]:
    return latency.step_s, latency.token_s, latency.pair_s, latency.context_token_s


def _waiting_weights(latency: Latency) -> tuple[float, ...]:
    return latency.queueing_weight, latency.joining_weight, latency.waiting_s, latency.waiting_context_s


def _prefill_prior(prior: Latency) -> RidgePrior:
    weights = _prefill_weights(prior)
    return RidgePrior(
        weights,
        tuple([1.0 / (error * weight) ** 2 for error, weight in zip(PRIOR_ERRORS, weights, strict=True)]),
        (0.0, LEAST_SHARE * weights[1], 0.0, 0.0),
        tuple([MOST_TIMES * weight for weight in weights]),
    )


def _waiting_prior(prior: Latency) -> RidgePrior:
    """Constants are in parts of a step's time, so that they suit any engine."""
    part_s = prior.step_tokens * prior.token_s / 4
    context_s = prior.context_token_s
    return RidgePrior(
        (1.0, 0.5, 0.0, 0.0),
        (3.0, 1.0, 0.3 / part_s**2, 0.3 / context_s**2),
        (0.5, 0.0, -part_s, -context_s),
        (2.0, 2.0, 5.0 * part_s, 5.0 * context_s),
    )


def _certainty(usual: float, error: float) -> float:
    """One over the variance of an error; less of one beyond the usual, so that it teaches no more than that would."""
    return 1.0 / (usual * max(usual, abs(error)))


def _dot(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum([left * right for left, right in zip(one, other, strict=True)])
