"""The expected TTFT, learned online from the pool's own first tokens: a linear model.

``ttft_s = w . (1, queueing, compute, attention, context)``. The paper's formula (``scheduling.ttft``) is the prior: one
second for each second of queueing and of compute. Samples add what a prefill rate alone cannot show: the wait for an
engine step, the attention of new tokens to a long cached prompt, and decoding, which shares every step and grows
with the context in KV memory.

Recursive least squares with exponential forgetting (S. Haykin, "Adaptive Filter Theory"). Errors are relative to the
measured TTFT. An error beyond ``SURPRISE_SHARE`` of it is weighted down, so that it changes the weights no more than
one of that size, and reduces the variance correspondingly less (Huber's weights in a recursive least M-estimate; S.-C.
Chan and Y.-X. Zou, "A recursive least M-estimate algorithm for robust adaptive filtering in impulsive noise", 2004):
most large errors are requests whose instance received others before their first token. The covariance is kept exactly
symmetric: forgetting would let any asymmetry grow without bound.
"""

from __future__ import annotations

from scheduling.values import value

Weights = tuple[float, ...]
"""Seconds per scaled feature, in the order of ``scaled``."""

FEATURES = 5
PRIOR_WEIGHTS: Weights = (0.03, 1.0, 1.0, 0.0, 0.0)
PRIOR_COVARIANCE: tuple[float, ...] = tuple(
    float(row == column) for row in range(FEATURES) for column in range(FEATURES)
)
KEEP = 0.98
"""Share of every former sample's weight that is kept at each new one: about fifty are remembered."""
SURPRISE_SHARE = 0.2
"""Of the measured TTFT: errors beyond it are weighted down."""
LEAST_TTFT_S = 0.1
"""Shorter ones count as this long: their error is an engine step's, not the model's."""
UNCERTAIN = 10.0
"""Variance from which on nothing is forgotten: keep what recent requests did not exercise."""


@value
class TtftModel:
    """What the first tokens of a pool have taught so far."""

    weights: Weights = PRIOR_WEIGHTS
    covariance: tuple[float, ...] = PRIOR_COVARIANCE
    """Of the weights, row by row."""

    def after(self, features: tuple[float, ...], ttft_s: float) -> TtftModel:
        """The model after one more first token, ``ttft_s`` >= 0 after its request came.

        ``features`` are those of its placement: 1, seconds of prefill ahead, seconds of own prefill, 100 million pairs
        of attention, KV memory's worths of running context.
        """
        unit_s = max(LEAST_TTFT_S, ttft_s)
        seen = [part / unit_s for part in features]
        weights, covariance = self.weights, self.covariance
        if min(_variances(covariance)) <= 0.0:  # corrupted by rounding or by hand: start again
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


def _dot(one: Weights | list[float], other: tuple[float, ...] | list[float]) -> float:
    """Of the five features."""
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2] + one[3] * other[3] + one[4] * other[4]


def _variances(covariance: tuple[float, ...]) -> tuple[float, ...]:
    return covariance[:: FEATURES + 1]
