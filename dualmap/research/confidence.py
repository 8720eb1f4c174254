"""One competitor against the best other, over seeds, and whether a ranking of several holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualmap.simulation.figures.mean import Mean


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
