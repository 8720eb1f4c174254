"""Ridge regression: what it finds, what it keeps to, and what it forgets."""

from __future__ import annotations

import random
from functools import reduce

import pytest

from scheduling.ridge import RidgePrior, RidgeSums

PRIOR = RidgePrior((1.0, 0.5), (1.0, 1.0), (0.0, 0.0), (10.0, 2.0))
TRUTH = (3.0, 0.2)


def observed(count: int, *, features: tuple[float, ...] | None = None, keep: float = 1.0, seed: int = 1) -> RidgeSums:
    rng = random.Random(seed)
    sums = RidgeSums.empty(2)
    for _ in range(count):
        one = features or (rng.random(), rng.random())
        target = sum(weight * feature for weight, feature in zip(TRUTH, one, strict=True))
        sums = sums.after(one, target, certainty=100.0, keep=keep)
    return sums


def settled(prior: RidgePrior, sums: RidgeSums) -> tuple[float, ...]:
    return reduce(lambda found, _: prior.weights_after(sums, found), range(50), prior.weights)


def test_without_observations_it_is_the_prior() -> None:
    assert PRIOR.weights_after(RidgeSums.empty(2), (7.0, 1.0)) == PRIOR.weights


def test_it_finds_the_weights_behind_what_it_saw() -> None:
    assert PRIOR.weights_after(observed(200), PRIOR.weights) == pytest.approx(TRUTH, rel=0.05)


def test_what_was_never_seen_apart_stays_as_believed() -> None:
    weights = PRIOR.weights_after(observed(200, features=(1.0, 0.0)), PRIOR.weights)

    assert weights == pytest.approx((TRUTH[0], 0.5), rel=0.01)


def test_what_is_no_longer_seen_returns_to_the_prior() -> None:
    sums = observed(200)
    for _ in range(400):
        sums = sums.after((1.0, 0.0), TRUTH[0], certainty=100.0, keep=0.9)

    assert settled(PRIOR, sums) == pytest.approx((TRUTH[0], 0.5), rel=0.01)


def test_no_weight_leaves_its_bounds_and_the_others_make_the_best_of_it() -> None:
    bounded = RidgePrior((1.0, 0.5), (1e-6, 1e-6), (0.0, 0.0), (2.0, 2.0))
    sums = observed(500)

    first, second = settled(bounded, sums)

    assert first == 2.0
    best = (sums.targets[1] - sums.products[2] * 2.0) / sums.products[3]
    assert second == pytest.approx(best, rel=1e-4) and second > TRUTH[1]


def test_an_observation_counts_by_its_certainty() -> None:
    sums = RidgeSums.empty(2).after((1.0, 0.0), 4.0, certainty=300.0, keep=1.0)
    sums = sums.after((1.0, 0.0), 8.0, certainty=100.0, keep=1.0)

    assert settled(PRIOR, sums)[0] == pytest.approx(5.0, rel=0.01)


def test_sums_survive_as_floats() -> None:
    sums = observed(5)

    assert RidgeSums.from_floats(2, sums.floats()) == sums
