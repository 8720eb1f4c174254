"""Random values from a quantile table: how a measured distribution is carried into a generator."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

MEASURED_PROBABILITIES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """A distribution given by some of its quantiles; between them it is log-linear (linear around 0 and below).

    Only ``Random.random`` is used: its sequence for a seed is the same on every Python.
    """

    points: tuple[tuple[float, float], ...]
    """(probability, value) pairs, both rising, from probability 0 to 1."""

    @classmethod
    def of(cls, *values: float) -> QuantileTable:
        """A table from the values at MEASURED_PROBABILITIES."""
        return cls(tuple(zip(MEASURED_PROBABILITIES, values, strict=True)))

    def __post_init__(self) -> None:
        probabilities = [p for p, _ in self.points]
        values = [v for _, v in self.points]
        if probabilities[0] != 0 or probabilities[-1] != 1 or sorted(set(probabilities)) != probabilities:
            raise ValueError("probabilities must rise from 0 to 1")
        if sorted(values) != values:
            raise ValueError("values must not fall")

    def value(self, probability: float) -> float:
        """The quantile at ``probability`` in [0, 1]."""
        index = min(bisect_right(self.points, (probability, math.inf)), len(self.points) - 1)
        (p0, v0), (p1, v1) = self.points[index - 1], self.points[index]
        share = (probability - p0) / (p1 - p0)
        if v0 > 0:
            return v0 * math.pow(v1 / v0, share)
        return v0 + (v1 - v0) * share

    def sample(self, rng: Random) -> float:
        return self.value(rng.random())

    def sample_int(self, rng: Random) -> int:
        return round(self.sample(rng))


def exponential(rng: Random, mean: float) -> float:
    """An exponentially distributed value; ``Random.expovariate`` may differ between Pythons."""
    return -mean * math.log(1.0 - rng.random())


def kind_at(probability: float, kinds: Sequence[tuple[float, object]]) -> int:
    """The place among (share, …) pairs, whose shares add up to 1, that ``probability`` in [0, 1) falls into."""
    for place, (share, _) in enumerate(kinds):
        probability -= share
        if probability < 0:
            return place
    return len(kinds) - 1
