"""Ridge regression: what it finds, what it keeps to, and what it forgets."""

from __future__ import annotations

import random
from functools import reduce

import pytest

from dualmap.scheduling.estimates.ridge import Ridge

RIDGE = Ridge.of((1.0, 0.5), (1.0, 1.0), (0.0, 0.0))
TRUTH = (3.0, 0.2)


def observed(
    ridge: Ridge, count: int, *, features: tuple[float, ...] | None = None, keep: float = 1.0, seed: int = 1
) -> Ridge:
    rng = random.Random(seed)
    for _ in range(count):
        one = features or (rng.random(), rng.random())
        target = sum(weight * feature for weight, feature in zip(TRUTH, one, strict=True))
        ridge = ridge.observed(one, target, usual_error=0.1, most_error=1e9, keep=keep).solved()
    return ridge


def settled(ridge: Ridge) -> Ridge:
    return reduce(lambda found, _: found.solved(), range(50), ridge)


def test_without_observations_it_is_the_prior() -> None:
    assert RIDGE.solved().weights == (1.0, 0.5)
    assert RIDGE.expected((2.0, 4.0)) == 4.0


def test_it_finds_the_weights_behind_what_it_saw() -> None:
    assert observed(RIDGE, 300).weights == pytest.approx(TRUTH, rel=0.05)


def test_observations_count_once_they_are_solved() -> None:
    noted = RIDGE.observed((1.0, 0.0), 3.0, usual_error=0.1, most_error=1e9, keep=1.0)

    assert noted.weights == RIDGE.weights
    assert noted.solved().weights[0] > 1.2


def test_what_was_never_seen_apart_stays_as_believed() -> None:
    weights = observed(RIDGE, 200, features=(1.0, 0.0)).weights

    assert weights == pytest.approx((TRUTH[0], 0.5), rel=0.01)


def test_what_is_no_longer_seen_returns_to_the_prior() -> None:
    ridge = observed(observed(RIDGE, 300), 400, features=(1.0, 0.0), keep=0.9)

    assert settled(ridge).weights == pytest.approx((TRUTH[0], 0.5), rel=0.01)


def test_no_weight_falls_below_its_least_and_the_others_make_the_best_of_it() -> None:
    ridge = settled(observed(Ridge.of((1.0, 0.5), (1e3, 1e3), (0.0, 0.5)), 500))

    first, second = ridge.weights
    assert second == 0.5
    assert first == pytest.approx((ridge.targets[0] - ridge.products[1] * 0.5) / ridge.products[0], rel=1e-4)
    assert first < TRUTH[0]


def test_an_observation_counts_by_the_square_of_its_usual_error() -> None:
    ridge = RIDGE.observed((1.0, 0.0), 1.2, usual_error=1.0, most_error=9.0, keep=1.0)
    ridge = ridge.observed((1.0, 0.0), 1.8, usual_error=2.0, most_error=9.0, keep=1.0)

    # given a prior of 1 with the certainty 1, and observations of 1.2 with 1 and of 1.8 with a quarter
    assert settled(ridge).weights[0] == pytest.approx((1.0 + 1.2 + 1.8 / 4) / (1 + 1 + 1 / 4))


def test_an_error_beyond_the_most_teaches_no_more_than_that() -> None:
    known = observed(RIDGE, 200, features=(1.0, 0.0))

    most, absurd = (
        known.observed((1.0, 0.0), TRUTH[0] + error, usual_error=0.1, most_error=0.3, keep=1.0).solved().weights[0]
        for error in (0.3, 1e6)
    )

    assert absurd - known.weights[0] == pytest.approx(most - known.weights[0], rel=0.05)
