"""Ridge regression, learned online: least squares with a prior that is never forgotten.

Observations come one at a time and are kept as decayed sums, so that a step costs the same for ever. Where they say
nothing of a weight, or no longer do, it returns to its prior. Weights are the minimum over those above their least,
found by coordinate descent (J. Friedman, T. Hastie, R. Tibshirani, "Regularization Paths for Generalized Linear Models
via Coordinate Descent", 2010), which starts from the last ones and needs no scaling of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from dualmap.scheduling.values import replaced, value

SWEEPS = 8
"""Sweeps of coordinate descent; the sums change little from one call to the next."""


@value
class Ridge:
    """Beliefs about the weights, and the observations since as far as the least squares need them."""

    prior: tuple[float, ...]
    certainties: tuple[float, ...]
    """One over the variance of each weight of the prior."""
    least: tuple[float, ...]
    weights: tuple[float, ...]
    products: tuple[float, ...]
    """Weighted products of two features, row by row."""
    targets: tuple[float, ...]
    """Weighted products of a feature and the target."""

    @classmethod
    def of(cls, prior: Sequence[float], errors: Sequence[float], least: Sequence[float]) -> Ridge:
        """Nothing observed yet; ``errors`` are the usual ones of the prior."""
        size = len(prior)
        certainties = tuple([error**-2 for error in errors])
        return cls(tuple(prior), certainties, tuple(least), tuple(prior), (0.0,) * (size * size), (0.0,) * size)

    def expected(self, features: Sequence[float]) -> float:
        return sum([weight * feature for weight, feature in zip(self.weights, features, strict=True)])

    def observed(
        self, features: Sequence[float], target: float, *, usual_error: float, keep: float, most_error: float = inf
    ) -> Ridge:
        """Return the model with one more observation; the weights stay as they are until ``solved``.

        Args:
            usual_error: its standard deviation.
            keep: what is left of the observations before, 0..1.
            most_error: a larger one has the weight that makes it teach as much as this one would (Huber's weights).
        """
        error = abs(target - self.expected(features))
        certainty = (1.0 if error <= most_error else most_error / error) / usual_error**2
        weighted = [certainty * feature for feature in features]
        grown = [one * other for one in weighted for other in features]
        return replaced(
            self,
            products=tuple([keep * former + more for former, more in zip(self.products, grown, strict=True)]),
            targets=tuple([keep * former + more * target for former, more in zip(self.targets, weighted, strict=True)]),
        )

    def solved(self) -> Ridge:
        """Return the model with the weights that the prior and the observations make likeliest."""
        found, size = list(self.weights), len(self.weights)
        for _ in range(SWEEPS):
            for row in range(size):
                products, certainty = self.products[row * size : (row + 1) * size], self.certainties[row]
                pull = self.targets[row] + certainty * self.prior[row] + products[row] * found[row]
                for product, weight in zip(products, found, strict=True):
                    pull -= product * weight
                found[row] = max(self.least[row], pull / (products[row] + certainty))
        return replaced(self, weights=tuple(found))
