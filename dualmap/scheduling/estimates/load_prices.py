"""The price of loads from one tier of an instance, or of pulls to it, measured from the engine's own counters at every
reading.

Between two readings the link was busy for

    start_s · loads + token_s · tokens

which is learned by ridge regression. Counters that went back are those of an engine that was restarted: its price
stays, and what was counted before says nothing. A price that no link has is not believed: the prior stands in for it,
with the reason named.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from dualmap.scheduling.estimates.kv_tiers import LoadPrice, Tier
from dualmap.scheduling.estimates.ridge import Ridge
from dualmap.scheduling.values import value

PRIORS: Final = MappingProxyType(
    {Tier.HOST: LoadPrice(0.005, 4e-6), Tier.DISK: LoadPrice(0.01, 2e-5), Tier.POOL: LoadPrice(0.01, 2e-5)}
)
"""Prices before anything was loaded: 100 kB a token at 25 GB/s from host memory, at 5 GB/s from a disk or a pool."""
PULL_PRIOR: Final = LoadPrice(0.03, 2e-5)
"""The price of a pull before anything was pulled."""
TOKENS_UNIT: Final = 10_000
"""Tokens are learned in this unit, so that both features are about one."""
START_ERROR_S, TOKEN_ERRORS = 0.3, 20.0
"""Usual errors of the prior: of the start in seconds, of the time per token in multiples of it."""
ERROR_S, ERROR_SHARE = 0.005, 0.1
"""Usual error of a busy time, a constant and a share of it."""
KEEP: Final = 0.9
"""Share of a former reading's weight that remains at each new one: about ten are remembered."""
MOST_TOKEN_S, LEAST_TOKEN_S = 0.01, 1e-9
"""A token that takes longer to load is not believed: even a thousandth of it is slow to compute. Nor is one that takes
less: a kilobyte, which is little for a token, at a terabyte a second."""
MOST_COUNTED: Final = 1e15
"""A counter above is not believed: a thousand tokens each microsecond, for ten days."""


@value
class LoadReading:
    """Counters of one tier since its engine started."""

    tokens: float
    busy_s: float
    loads: float = 0.0
    """Number of loads; 0 where the engine does not count them: their start is a part of each token then."""

    @property
    def is_sound(self) -> bool:
        return all(0 <= each <= MOST_COUNTED for each in (self.tokens, self.busy_s, self.loads))

    def since(self, former: LoadReading) -> LoadReading | None:
        """The counts since an earlier reading; None where a counter went back."""
        grown = (self.tokens - former.tokens, self.busy_s - former.busy_s, self.loads - former.loads)
        return None if min(grown) < 0 else LoadReading(*grown)


@dataclass(slots=True)
class MeasuredPrice:
    """The price of one tier of one instance."""

    tier: Tier | None
    """None: it is that of pulls."""
    reason: str = ""
    """Why it is the prior although something was loaded; empty where it is measured, or nothing was loaded yet."""
    is_measured: bool = False
    """Something was loaded, at a price that can be believed."""
    _model: Ridge = field(init=False)
    _former: LoadReading | None = None

    def __post_init__(self) -> None:
        prior = self.prior
        unit_s = prior.token_s * TOKENS_UNIT
        self._model = Ridge.of((prior.start_s, unit_s), (START_ERROR_S, TOKEN_ERRORS * unit_s), (0.0, 1e-4 * unit_s))

    @property
    def prior(self) -> LoadPrice:
        return PULL_PRIOR if self.tier is None else PRIORS[self.tier]

    @property
    def why_prior(self) -> str:
        """Why the price is the prior, in words; empty where it is measured."""
        return self.reason or ("" if self.is_measured else "nothing was loaded yet")

    @property
    def price(self) -> LoadPrice:
        if self.reason:
            return self.prior
        start_s, unit_s = self._model.weights
        return LoadPrice(start_s, unit_s / TOKENS_UNIT)

    def read(self, reading: LoadReading) -> None:
        """Learn from the counters as they are now."""
        if not reading.is_sound:
            self.reason = "its counters of loads are no numbers that can be"
            return
        former, self._former = self._former, reading
        grown = None if former is None else reading.since(former)
        if grown is None or not grown.tokens:
            return
        if not LEAST_TOKEN_S * grown.tokens <= grown.busy_s <= MOST_TOKEN_S * grown.tokens:
            self.reason = f"it reports {grown.busy_s:g} s for loads of {grown.tokens:g} tokens"
            return
        self.reason, self.is_measured = "", True
        features = (grown.loads, grown.tokens / TOKENS_UNIT)
        usual_error = ERROR_S + ERROR_SHARE * grown.busy_s
        self._model = self._model.observed(features, grown.busy_s, usual_error=usual_error, keep=KEEP).solved()
