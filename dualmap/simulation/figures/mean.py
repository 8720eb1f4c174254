"""A mean with its 95 % confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
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
