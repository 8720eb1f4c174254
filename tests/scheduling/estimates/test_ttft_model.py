"""The learned TTFT: its prior, what it learns, and what it must not do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.scheduling.estimates.ridge import Ridge
from dualmap.scheduling.estimates.ttft_model import Features, learn_ttft, ttft_prior

TRUTH = (0.08, 1.1, 0.8, 0.5, 0.2)
"""Weights of a pool that this file makes up."""


def placements(count: int, seed: int = 1) -> list[Features]:
    rng = random.Random(seed)
    return [
        (1.0, 3 * rng.random(), 2 * rng.random(), 3 * rng.random(), rng.random() if rng.random() < 0.9 else 0.0)
        for _ in range(count)
    ]


def true_ttft_s(features: Features) -> float:
    return sum(weight * part for weight, part in zip(TRUTH, features, strict=True))


def experienced(model: Ridge, features: list[Features]) -> Ridge:
    return learn_ttft(model, [(one, true_ttft_s(one)) for one in features])


def test_the_prior_gives_a_prompt_of_eight_thousand_tokens_about_the_time_that_the_rate_says() -> None:
    for tokens_per_s, within in ((8280.0, 0.05), (4500.0, 0.1)):  # the presets' rates
        compute_s, pairs = 8192 / tokens_per_s, 8192**2 / 2 / 1e8
        expected_s = ttft_prior().expected((1.0, 2.0, compute_s, pairs, 0.5))
        assert expected_s - 2.0 == pytest.approx(compute_s, rel=within)


def test_it_learns_what_the_pool_does() -> None:
    model = ttft_prior()
    for seed in range(20):
        model = experienced(model, placements(20, seed))

    for one in placements(20, seed=99):
        assert model.expected(one) == pytest.approx(true_ttft_s(one), rel=0.05)


def test_it_follows_a_pool_that_changes() -> None:
    slow = [(one, 3 * true_ttft_s(one)) for one in placements(300, seed=2)]
    model = experienced(ttft_prior(), placements(300))
    for start in range(0, 300, 10):
        model = learn_ttft(model, slow[start : start + 10])

    errors = sorted(abs(model.expected(one) / (3 * true_ttft_s(one)) - 1) for one in placements(20, seed=99))
    assert errors[10] < 0.15


def test_short_prompts_do_not_spoil_the_estimate_of_long_ones() -> None:
    # given prompts of 20 to 400 tokens at 8,000 tokens/s, which all take the time of a step that reads the weights
    rng, model = random.Random(1), ttft_prior()
    for _ in range(60):
        model = learn_ttft(model, [((1.0, 0.0, rng.uniform(0.0025, 0.05), 0.0, 0.0), 0.04) for _ in range(10)])

    assert model.expected((1.0, 0.0, 2.0, 1.28, 0.0)) == pytest.approx(2.2, rel=0.3)


def test_now_and_then_a_request_that_others_overtook_hardly_moves_the_others() -> None:
    one = (1.0, 0.5, 0.5, 0.0, 0.2)
    model = learn_ttft(ttft_prior(), [(one, 20.0 if number % 10 == 0 else 1.0) for number in range(300)])

    assert model.expected(one) == pytest.approx(1.0, rel=0.15)


def test_nothing_new_changes_nothing() -> None:
    assert learn_ttft(ttft_prior(), []).weights == ttft_prior().weights


parts = st.floats(0.0, 1e6)


@given(st.lists(st.tuples(st.tuples(st.just(1.0), parts, parts, parts, parts), st.floats(0.0, 1e7)), max_size=60))
@settings(max_examples=100)
def test_whatever_it_is_told_no_weight_is_negative_or_infinite(seen: list[tuple[Features, float]]) -> None:
    model = learn_ttft(ttft_prior(), seen)

    assert all(0.0 <= weight < float("inf") for weight in model.weights)
