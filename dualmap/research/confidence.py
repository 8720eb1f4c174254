"""Means over seeds with their 95 % confidence intervals, one against the best other, and whether a ranking holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

# Two-sided 95 % quantiles of Student's t distribution by degrees of freedom, from 1 on.
_T95: tuple[float, ...] = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
_T95 += (2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048)
_Z95 = 1.959964
"""Quantile of the normal distribution at 95 %."""


def _t95(freedom: int) -> float:
    """Student's quantile by degrees of freedom; behind the table Cornish and Fisher's expansion, right to four digits
    there."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and the half width of its 95 % confidence interval (Student's t; 0 with one value, which has none)."""

    value: float
    half_width: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Raises ValueError without values."""
        if not values:
            raise ValueError("a mean needs at least one value")
        count = len(values)
        # A mean over a value that was infinite in one seed is infinite; there is no interval around it.
        if count == 1 or any(abs(value) == float("inf") for value in values):
            return cls(fmean(values), 0.0, tuple(values))
        return cls(fmean(values), _t95(count - 1) * stdev(values) / sqrt(count), tuple(values))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first of several competitors against the best of the others by mean; differences are taken seed by seed."""

    first: str
    best_other: str
    own: Mean
    other: Mean

    @classmethod
    def of(cls, figures: Mapping[str, Sequence[float]], *, highest_best: bool = True) -> Comparison:
        """Raises ValueError with fewer than two competitors."""
        means = {name: Mean.of(values) for name, values in figures.items()}
        first, *others = means
        best = (max if highest_best else min)(others, key=lambda name: means[name].value)
        return cls(first, best, means[first], means[best])

    @property
    def percent(self) -> Mean | None:
        """How much more than the other's, in percent of it; None where that is 0."""
        if not all(self.other.values):
            return None
        return Mean.of([100 * (own / other - 1) for own, other in self._pairs()])

    @property
    def points(self) -> Mean:
        """The difference of shares, in percentage points."""
        return Mean.of([100 * (own - other) for own, other in self._pairs()])

    def _pairs(self) -> Iterable[tuple[float, float]]:
        return zip(self.own.values, self.other.values, strict=True)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Competitors by one figure, in every seed."""

    orders: tuple[tuple[tuple[str, ...], ...], ...]
    """Places in each seed, best first; competitors with equal figures share one."""

    @classmethod
    def of(cls, figures: Mapping[str, Sequence[float]], *, highest_first: bool = True) -> Ranking:
        seeds = len(next(iter(figures.values())))
        orders = []
        for seed in range(seeds):
            places: dict[float, list[str]] = {}
            for name, values in figures.items():
                places.setdefault(values[seed], []).append(name)
            orders.append(tuple(tuple(places[value]) for value in sorted(places, reverse=highest_first)))
        return cls(tuple(orders))

    @property
    def firsts(self) -> Mapping[str, int]:
        """The number of seeds in which each came first, alone or with others; those that never did are missing."""
        return Counter(name for order in self.orders for name in order[0])

    @property
    def winner_holds(self) -> bool:
        """Whether one and the same came first in every seed."""
        return len(self.orders) in self.firsts.values()

    @property
    def holds(self) -> bool:
        """Whether the whole order is the same in every seed."""
        return len(set(self.orders)) == 1
