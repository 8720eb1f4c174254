"""The expected TTFT as an instance's own history tells it: a linear model, learned online.

``ttft_s = w . (1, queueing, compute, attention, context)``. The paper's formula (``scheduling.ttft``) is the prior: one
second for each second of queueing and of compute. Experience adds what a prefill rate alone cannot tell: the wait for
an engine step, the attention of new tokens to a long cached prompt, and decoding, which shares every step and grows
with the context in KV memory.

Recursive least squares with exponential forgetting (S. Haykin, "Adaptive Filter Theory"). Errors count relative to
the TTFT that was seen. One beyond ``SURPRISE_SHARE`` of it has the weight that makes it teach no more than one of that
size, and gives as much less certainty (Huber's weights in a recursive least M-estimate; S.-C. Chan and Y.-X. Zou, "A
recursive least M-estimate algorithm for robust adaptive filtering in impulsive noise", 2004): most surprises are
requests whose instance was given others before their first token. Plain arithmetic in a fixed order, so that the Lua
twin in the state store agrees to the last digit, and the covariance stays symmetric to the last digit: forgetting would
let the least asymmetry grow without bound.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduling.values import value

Weights = tuple[float, ...]
"""Seconds per scaled feature, in the order of ``scaled``."""

FEATURES = 5
PRIOR_WEIGHTS: Weights = (0.03, 1.0, 1.0, 0.0, 0.0)
PRIOR_COVARIANCE: tuple[float, ...] = tuple(
    float(row == column) for row in range(FEATURES) for column in range(FEATURES)
)
KEEP = 0.98
"""Of every former observation's weight at each new one: about fifty are remembered."""
SURPRISE_SHARE = 0.2
"""Of the TTFT that was seen: errors beyond it are surprises."""
LEAST_TTFT_S = 0.1
"""Shorter ones count as this long: their error is an engine step's, not the model's."""
UNCERTAIN = 10.0
"""Variance from which on nothing is forgotten: what the requests of late did not show must not be forgotten too."""


class TtftFeatures(NamedTuple):
    """What is known of a request and its instance when it is placed; integers, so that no store rounds them."""

    queueing_ms: int
    """Prefill of the work ahead, see ``scheduling.ttft.remaining_queueing_s``."""
    compute_ms: int
    """Prefill of the own uncached tokens."""
    attention_million_pairs: int
    """Pairs of an uncached token and a token before it."""
    context_tokens: int
    """Expected context of the instance's running requests, see ``InstanceLoad.context_tokens``."""


@value
class TtftModel:
    """What one instance has taught so far."""

    weights: Weights = PRIOR_WEIGHTS
    covariance: tuple[float, ...] = PRIOR_COVARIANCE
    """Of the weights, row by row."""

    def after(self, features: TtftFeatures, ttft_s: float) -> TtftModel:
        """The model after one more first token, ``ttft_s`` >= 0 after its request came."""
        unit_s = max(LEAST_TTFT_S, ttft_s)
        seen = [part / unit_s for part in scaled(features)]
        weights, covariance = self.weights, self.covariance
        if min(_variances(covariance)) <= 0.0:  # what rounding or a foreign hand has spoilt does not heal
            weights, covariance = PRIOR_WEIGHTS, PRIOR_COVARIANCE
        error = ttft_s / unit_s - _dot(weights, seen)
        trust = SURPRISE_SHARE / abs(error) if abs(error) > SURPRISE_SHARE else 1.0
        spread = [_dot(covariance[row * FEATURES : (row + 1) * FEATURES], seen) for row in range(FEATURES)]
        keep = KEEP if max(_variances(covariance)) < UNCERTAIN else 1.0
        gain = trust / (keep + trust * _dot(seen, spread))
        return TtftModel(
            tuple([weight + gain * part * error for weight, part in zip(weights, spread, strict=True)]),
            tuple(
                [
                    (covariance[row * FEATURES + column] - gain * (spread[row] * spread[column])) / keep
                    for row in range(FEATURES)
                    for column in range(FEATURES)
                ]
            ),
        )


def scaled(features: TtftFeatures) -> tuple[float, float, float, float, float]:
    """The features in units that make all of them about one: s, s, 100 million pairs, million tokens."""
    queueing_ms, compute_ms, million_pairs, context_tokens = features
    return 1.0, queueing_ms / 1000, compute_ms / 1000, million_pairs / 100, context_tokens / 1_000_000


def modelled_ttft_s(weights: Weights, features: TtftFeatures) -> float:
    """The expected TTFT; never negative."""
    return max(0.0, _dot(weights, scaled(features)))


def attention_million_pairs(uncached_tokens: int, cached_tokens: int) -> int:
    """Pairs of tokens that the attention of a prefill looks at."""
    return uncached_tokens * (2 * cached_tokens + uncached_tokens) // 2_000_000


def _dot(one: Weights | list[float], other: tuple[float, ...] | list[float]) -> float:
    """Not ``sum``, which later Pythons compensate for rounding, and Lua does not."""
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2] + one[3] * other[3] + one[4] * other[4]


def _variances(covariance: tuple[float, ...]) -> tuple[float, ...]:
    return covariance[:: FEATURES + 1]
