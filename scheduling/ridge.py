"""Ridge regression, learned online: least squares with a prior that is never forgotten, within bounds.

Observations come one at a time and are kept as decayed sums, so that a step costs the same for ever. Where they say
nothing of a weight, or no longer do, it returns to its prior; none leaves its bounds. Weights are the minimum over the
box, found by coordinate descent (J. Friedman, T. Hastie, R. Tibshirani, "Regularization Paths for Generalized Linear
Models via Coordinate Descent", 2010), which starts from the last ones and needs no scaling of the features.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.values import value

SWEEPS = 8
"""Of coordinate descent after an observation; the sums change little from one to the next."""


@value
class RidgeSums:
    """Decayed sums over observations, as far as the least squares of a few features need them."""

    products: tuple[float, ...]
    """Weighted products of two features, row by row."""
    targets: tuple[float, ...]
    """Weighted products of a feature and the target."""

    @classmethod
    def empty(cls, features: int) -> RidgeSums:
        return cls((0.0,) * (features * features), (0.0,) * features)

    @classmethod
    def from_floats(cls, features: int, floats: Sequence[float]) -> RidgeSums:
        """The sums that ``floats`` gave."""
        return cls(tuple(floats[: features * features]), tuple(floats[features * features :]))

    def floats(self) -> tuple[float, ...]:
        return (*self.products, *self.targets)

    def after(self, features: Sequence[float], target: float, *, certainty: float, keep: float) -> RidgeSums:
        """The sums after one more observation.

        Args:
            certainty: its weight, one over the variance of its error.
            keep: what is left of the weight of those before, 0..1.
        """
        weighted = [certainty * feature for feature in features]
        grown = [one * other for one in weighted for other in features]
        return RidgeSums(
            tuple([keep * former + more for former, more in zip(self.products, grown, strict=True)]),
            tuple([keep * former + more * target for former, more in zip(self.targets, weighted, strict=True)]),
        )


@value
class RidgePrior:
    """What is believed of each weight without observations: a value, one over its variance, and its bounds."""

    weights: tuple[float, ...]
    certainties: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]

    def weights_after(self, sums: RidgeSums, start: Sequence[float]) -> tuple[float, ...]:
        """The weights that the prior and the observations make likeliest; ``start`` is a guess, as the last ones."""
        found, size = list(start), len(self.weights)
        for _ in range(SWEEPS):
            for row in range(size):
                products = sums.products[row * size : (row + 1) * size]
                pull = sums.targets[row] + self.certainties[row] * self.weights[row] + products[row] * found[row]
                for product, weight in zip(products, found, strict=True):
                    pull -= product * weight
                weight = pull / (products[row] + self.certainties[row])
                found[row] = min(self.most[row], max(self.least[row], weight))
        return tuple(found)
