from __future__ import annotations

import pytest

from scheduling.prefill_rate import LONGEST_STALL_S, MEMORY_S, PRIOR_S, PrefillRate, prefill_busy_s


def test_without_experience_the_configured_rate_is_believed() -> None:
    assert PrefillRate.prior(8000.0).tokens_per_s == 8000.0


def test_the_learned_rate_approaches_what_is_seen() -> None:
    rate = PrefillRate.prior(8000.0)

    for _ in range(100):
        rate = rate.after(tokens=2000, busy_s=1.0)

    assert rate.tokens_per_s == pytest.approx(2000.0, rel=0.02)


def test_the_prior_weighs_as_much_as_its_seconds() -> None:
    rate = PrefillRate.prior(8000.0).after(tokens=2000, busy_s=1.0)

    kept_s = PRIOR_S * MEMORY_S / (MEMORY_S + 1.0)
    assert rate.tokens_per_s == pytest.approx((8000 * kept_s + 2000) / (kept_s + 1.0))


def test_prefills_of_one_batch_are_counted_together() -> None:
    # given two prompts of 1000 tokens that one batch finishes after a second
    together = PrefillRate(0.0, 1e-9).after(1000, 1.0).after(1000, 0.0)

    assert together.tokens_per_s == pytest.approx(2000.0, rel=1e-6)


def test_a_change_of_speed_shows_after_about_the_memory() -> None:
    rate = PrefillRate.prior(8000.0)
    for _ in range(200):
        rate = rate.after(8000, 1.0)

    for _ in range(int(2 * MEMORY_S)):
        rate = rate.after(4000, 1.0)

    assert rate.tokens_per_s == pytest.approx(4000.0, rel=0.2)


def test_a_clock_that_is_set_forward_costs_the_rate_no_more_than_a_stall_does() -> None:
    known = PrefillRate(240_000.0, 30.0)

    jumped = known.after(tokens=800, busy_s=3600.0)

    assert jumped == known.after(tokens=800, busy_s=LONGEST_STALL_S + 0.1)
    assert jumped.tokens_per_s > known.tokens_per_s / 2


def test_an_engine_that_became_slow_for_good_is_known_as_such_all_the_same() -> None:
    rate = PrefillRate(240_000.0, 30.0)

    for _ in range(100):
        rate = rate.after(tokens=800, busy_s=40.0)

    assert rate.tokens_per_s == pytest.approx(20.0, rel=0.2)


def test_the_rate_can_always_be_divided_by() -> None:
    assert PrefillRate.prior(1.0).after(0, 1e6).tokens_per_s == 1.0


@pytest.mark.parametrize(
    ("ended_ms", "previous_end_ms", "dispatched_ms", "busy_s"),
    [(5000, 4000, 1000, 1.0), (5000, 1000, 4500, 0.5), (5000, 5000, 1000, 0.0), (5000, 6000, 1000, 0.0)],
)
def test_busy_time_starts_with_the_later_of_former_end_and_dispatch(
    ended_ms: int, previous_end_ms: int, dispatched_ms: int, busy_s: float
) -> None:
    assert prefill_busy_s(ended_ms, previous_end_ms, dispatched_ms) == busy_s
