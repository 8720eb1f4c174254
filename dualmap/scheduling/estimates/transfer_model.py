"""The time that the KV of a split request takes to reach its decode instance, learned from the pool's own history.

It spans the end of the prefill leg to the first token of the decode leg: the wait for memory there, the transfer, and
the first decode step. A split request's TTFT exceeds its prefill by this time. It is a constant and a time per token,
learned online by ridge regression; until then the settings say both.
"""

from __future__ import annotations

from collections.abc import Iterable

from dualmap.scheduling.estimates.ridge import Ridge

TOKENS_UNIT = 10_000
"""Transferred tokens are learned in this unit, so that both features are about one."""
PRIOR, PRIOR_ERRORS = (0.05, 0.05), (1.0, 1.0)
"""Seconds, and seconds per unit. The errors are wide: a few transfers replace it."""
KEEP = 0.95
"""Share of a former observation's weight that remains at each new one: about twenty are remembered."""
ERROR_S, ERROR_SHARE = 0.05, 0.15
"""Usual error of a time, a constant and a share of it. A larger one teaches no more than that: such a request waited
for memory, or for a decoder that hung."""


def transfer_prior() -> Ridge:
    return Ridge.of(PRIOR, PRIOR_ERRORS, (0.0, 0.0))


def learn_transfer(model: Ridge, seen: Iterable[tuple[int, float]]) -> Ridge:
    """The model after some more transfers: the tokens that were moved, and the time in seconds."""
    for tokens, transfer_s in seen:
        usual_error = ERROR_S + ERROR_SHARE * transfer_s
        features = (1.0, tokens / TOKENS_UNIT)
        model = model.observed(features, transfer_s, usual_error=usual_error, keep=KEEP, most_error=usual_error)
    return model.solved()


def transfer_cost(model: Ridge) -> tuple[float, float]:
    """The cost of a transfer as the model believes it: seconds, and seconds per token."""
    latency_s, unit_s = model.weights
    return latency_s, unit_s / TOKENS_UNIT
