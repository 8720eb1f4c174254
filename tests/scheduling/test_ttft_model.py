"""The learned TTFT: its prior, what it learns, and what it must not do."""

from __future__ import annotations

import random
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.ttft_model import FEATURES, TtftModel

TRUTH = (0.08, 1.1, 0.7, 0.5, 0.2)
"""Weights of an instance that this file makes up."""

Features = tuple[float, ...]
"""1, seconds of prefill ahead, of own prefill, 100 million attention pairs, KV memory's worths of context."""

features = st.tuples(st.just(1.0), st.floats(0, 60), st.floats(0, 10), st.floats(0, 10), st.floats(0, 2))


def requests(seed: int, count: int) -> list[Features]:
    rng = random.Random(seed)
    return [
        (1.0, 3 * rng.random(), 0.001 + 2 * rng.random(), 3 * rng.random(), 0.8 * rng.random()) for _ in range(count)
    ]


def true_ttft_s(one: Features) -> float:
    return sum(weight * part for weight, part in zip(TRUTH, one, strict=True))


def expected_s(model: TtftModel, one: Features) -> float:
    return sum(weight * part for weight, part in zip(model.weights, one, strict=True))


def variance(model: TtftModel, one: Features) -> float:
    """Of what the model expects of this request."""
    places = range(FEATURES)
    return sum(
        model.covariance[row * FEATURES + column] * one[row] * one[column] for row in places for column in places
    )


def taught(model: TtftModel, seen: list[Features]) -> TtftModel:
    return reduce(lambda known, one: known.after(one, true_ttft_s(one)), seen, model)


def test_without_experience_it_is_the_papers_formula_and_the_wait_for_a_step() -> None:
    assert expected_s(TtftModel(), (1.0, 2.0, 0.5, 0.77, 0.4)) == pytest.approx(2.53)


def test_it_finds_what_a_prefill_rate_cannot_tell() -> None:
    model = taught(TtftModel(), requests(seed=1, count=400))

    for one in requests(seed=2, count=50):
        assert expected_s(model, one) == pytest.approx(true_ttft_s(one), rel=0.03)


def test_it_follows_an_instance_that_changes() -> None:
    model = TtftModel()
    for one in requests(seed=3, count=400):
        model = model.after(one, 2 * true_ttft_s(one))

    model = taught(model, requests(seed=4, count=400))

    for one in requests(seed=5, count=50):
        assert expected_s(model, one) == pytest.approx(true_ttft_s(one), rel=0.1)


def test_one_request_in_twenty_that_others_held_up_changes_little() -> None:
    model = TtftModel()
    for number, one in enumerate(requests(seed=6, count=600)):
        model = model.after(one, true_ttft_s(one) * (8 if number % 20 == 0 else 1))

    for one in requests(seed=7, count=50):
        assert expected_s(model, one) == pytest.approx(true_ttft_s(one), rel=0.15)


def test_a_surprise_gives_no_more_certainty_than_what_it_expected() -> None:
    model, one = TtftModel(), (1.0, 1.0, 0.5, 1.0, 0.4)

    expected = model.after(one, expected_s(model, one))
    surprised = model.after(one, expected_s(model, one) / 3)

    assert variance(expected, one) <= variance(surprised, one) < variance(model, one)


def test_requests_that_are_all_alike_do_not_make_it_forget_the_rest() -> None:
    model = taught(TtftModel(), requests(seed=8, count=400))
    alike = (1.0, 0.0, 0.1, 0.01, 0.0)

    model = taught(model, [alike] * 5000)

    for one in requests(seed=9, count=50):
        assert expected_s(model, one) == pytest.approx(true_ttft_s(one), rel=0.2)


def test_it_is_as_good_after_ten_thousand_first_tokens() -> None:
    model, rng = TtftModel(), random.Random(11)

    for one in requests(seed=11, count=10_000):
        model = model.after(one, true_ttft_s(one) * rng.uniform(0.8, 1.25))

    rows = [model.covariance[start : start + 5] for start in range(0, 25, 5)]
    assert rows == [*zip(*rows, strict=True)]  # symmetric to the last digit
    assert all(rows[place][place] > 0 for place in range(5))
    for one in requests(seed=12, count=50):
        assert expected_s(model, one) == pytest.approx(true_ttft_s(one), rel=0.2)


def test_a_spoilt_covariance_makes_it_start_afresh() -> None:
    one = (1.0, 1.0, 0.5, 1.0, 0.4)
    spoilt = TtftModel(covariance=(-0.1, *TtftModel().covariance[1:]))

    assert spoilt.after(one, 2.0) == TtftModel().after(one, 2.0)


@given(st.lists(st.tuples(features, st.floats(0, 600)), max_size=60), features)
def test_whatever_it_sees_it_stays_finite(history: list[tuple[Features, float]], one: Features) -> None:
    model = reduce(lambda known, seen: known.after(*seen), history, TtftModel())

    assert abs(expected_s(model, one)) < float("inf")
    assert all(abs(part) < 1e6 for part in (*model.weights, *model.covariance))
