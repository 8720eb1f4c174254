"""The prices of loads of adapters, measured by first tokens: a factor for each leg, from host memory and into it.

An instance's description has the times of its loads: settings, or a default that fits neither every rank nor every
disk. No metric of vLLM 0.33 has a time of a load, but a first token that waited for one came so much later than without
it. What is beyond the expected time without a load is learned as a multiple of the described time, online and with the
description as the prior. One measurement teaches little: the request may have waited for something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dualmap.scheduling.estimates.ridge import Ridge

Prices = tuple[float, ...]
PRIOR_PRICES: Final[Prices] = (1.0, 1.0)
LEAST_PRICE, MOST_PRICE = 0.1, 20.0
"""Measurements beyond these factors are taken for something else than a load."""
PRIOR_ERROR = 2.0
"""Usual error of a described time, as a multiple of that."""
KEEP = 0.98
"""Share of a former observation's weight that remains at each new one: about fifty are remembered."""
ERROR_S, ERROR_SHARE = 0.1, 0.3
"""Usual error of the time of a load by a first token, a constant and a share of the first token's time."""


def prices_prior() -> Ridge:
    return Ridge.of(PRIOR_PRICES, (PRIOR_ERROR, PRIOR_ERROR), (LEAST_PRICE, LEAST_PRICE))


def learn_prices(model: Ridge, seen: Iterable[tuple[tuple[float, float], float]]) -> Ridge:
    """The model after some more first tokens: the described times of their loads from host memory and into it, and
    the time that they took beyond what was expected without, in seconds."""
    for described_s, taken_s in seen:
        taken_s = min(max(0.0, taken_s), MOST_PRICE * sum(described_s))
        usual_error = ERROR_S + ERROR_SHARE * taken_s
        model = model.observed(described_s, taken_s, usual_error=usual_error, keep=KEEP)
    return model.solved()


def prices_of(model: Ridge) -> Prices:
    return tuple([min(price, MOST_PRICE) for price in model.weights])
