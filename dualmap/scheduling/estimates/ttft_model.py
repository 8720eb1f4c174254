"""The expected TTFT, learned from a pool's own history: a linear model, learned online by ridge regression.

The prior is the paper's formula (``scheduling.estimates.ttft``), one second for each second of queueing and of compute,
with the attention of a typical prompt separated from its compute, and the wait for an engine step. Experience adds what
prefill rates alone cannot show: requests that overtake, the attention of new tokens to a long cached prompt, and
decoding, which shares every step and grows with the context in KV memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from dualmap.scheduling.estimates.ridge import Ridge

Features = tuple[float, ...]
"""Features of a placement: 1, seconds of prefill ahead, seconds of own prefill, 100 million pairs of attention, running
context in multiples of the KV memory."""
PRIOR_WEIGHTS: Features = (0.03, 1.0, 0.9, 0.3, 0.0)
"""Seconds for each. A rate is that of prompts of about 8,000 tokens, in which attention takes a tenth."""
PRIOR_ERRORS = (1.0, 1.0, 0.3, 1.0, 1.0)
"""Usual errors of the prior. Own prefill follows its rate: short prompts must not change that for long ones."""
KEEP = 0.98
"""Share of a former observation's weight that remains at each new one: about fifty are remembered."""
ERROR_S, ERROR_SHARE = 0.03, 0.15
"""Usual error of a TTFT, a constant and a share of it: what comes after a request decides much of it. A larger one
teaches no more than that: most such requests were overtaken by others."""


def ttft_prior() -> Ridge:
    return Ridge.of(PRIOR_WEIGHTS, PRIOR_ERRORS, (0.0,) * len(PRIOR_WEIGHTS))


def learn_ttft(model: Ridge, seen: Iterable[tuple[Features, float]]) -> Ridge:
    """The model after some more first tokens: the features of their placements, and their TTFT >= 0 in seconds."""
    for features, ttft_s in seen:
        usual_error = ERROR_S + ERROR_SHARE * ttft_s
        model = model.observed(features, ttft_s, usual_error=usual_error, keep=KEEP, most_error=usual_error)
    return model.solved()
