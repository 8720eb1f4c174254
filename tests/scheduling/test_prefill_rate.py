"""What first tokens teach of an instance's prefill rate, and what they must not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.instance import InstanceLoad, InstanceState
from scheduling.prefill_rate import MEMORY_S, BusyTime, PrefillRate

STEP_TOKENS = 2048


def prior(tokens_per_s: float = 8000.0) -> PrefillRate:
    window = 2 * STEP_TOKENS
    return PrefillRate.prior(
        InstanceLoad("a", InstanceState.READY, prefill_tokens_per_s=tokens_per_s, dispatch_window_tokens=window)
    )


def apart(tokens: int, busy_s: float, count: int) -> list[BusyTime]:
    """Prefills of one size with gaps between them."""
    busy_ms = round(1000 * busy_s)
    return [BusyTime(tokens, 1, 10 * busy_ms * number, (10 * number + 1) * busy_ms) for number in range(1, count + 1)]


def in_a_row(tokens: int, ends_ms: list[int]) -> list[BusyTime]:
    """Prefills of one size that follow each other; the first one begins at the first time."""
    return [BusyTime(tokens, 1, began_ms, ended_ms) for began_ms, ended_ms in pairwise(ends_ms)]


def test_without_experience_the_described_rate_is_believed() -> None:
    assert prior(8000.0).tokens_per_s == pytest.approx(8000.0)
    assert prior(8000.0).after([]).tokens_per_s == pytest.approx(8000.0)


def test_the_learned_rate_approaches_what_is_seen() -> None:
    # given prefills of ten steps at 2,000 tokens/s
    assert prior().after(apart(20_480, 10.24, 5)).tokens_per_s == pytest.approx(2000.0, rel=0.05)


@pytest.mark.parametrize("tokens", [20, 100, 400])
def test_prompts_that_fill_no_step_teach_nothing(tokens: int) -> None:
    rate = prior()

    assert rate.after(apart(tokens, 0.04, 500)).tokens_per_s == rate.tokens_per_s


def test_the_fixed_cost_of_a_step_is_told_from_the_rate() -> None:
    # given an engine that needs 80 ms for a step and 0.1 ms for a token, and prompts of less than a step
    rate = prior()
    for _ in range(20):
        seen = apart(600, 0.140, 3) + apart(1200, 0.200, 3)
        rate = rate.after(seen)

    full_step_s, shares_of_steps = 0.08 + 0.0001 * STEP_TOKENS, 1800 / 0.340
    assert rate.tokens_per_s == pytest.approx(STEP_TOKENS / full_step_s, rel=0.15)
    assert rate.tokens_per_s > 1.15 * shares_of_steps


def test_prefills_of_one_step_are_counted_together() -> None:
    # given 80 prompts of 400 tokens each that end by fives, every 250 ms
    ends_ms = [0] + [250 * (number // 5 + 1) for number in range(80)]

    assert prior().after(in_a_row(400, ends_ms)).tokens_per_s == pytest.approx(8000.0, rel=0.05)
    assert prior(2000.0).after(in_a_row(400, ends_ms)).tokens_per_s == pytest.approx(8000.0, rel=0.15)


def test_prefills_in_a_row_have_their_right_time_together() -> None:
    # given prompts of 2,000 tokens of which every other one ends together with a part of the next
    ends_ms = [0]
    for number in range(40):
        ends_ms.append(ends_ms[-1] + (400 if number % 2 else 100))

    assert prior().after(in_a_row(2000, ends_ms)).tokens_per_s == pytest.approx(8000.0, rel=0.05)


@pytest.mark.parametrize(("factor", "memories"), [(0.5, 2), (2.0, 2), (4.0, 4), (10.0, 8)])
def test_a_change_of_speed_shows_after_some_times_the_memory(factor: float, memories: int) -> None:
    rate = prior().after(apart(8000, 1.0, 200))

    for _ in range(int(memories * MEMORY_S / factor)):
        rate = rate.after(apart(8000, factor, 1))

    assert rate.tokens_per_s == pytest.approx(8000.0 / factor, rel=0.2)


def test_a_clock_that_was_set_forward_costs_the_rate_no_more_than_a_stall_does() -> None:
    rate = prior().after(apart(8000, 1.0, 60))

    stalled, jumped = (rate.after([BusyTime(8000, 1, 0, ended_ms)]) for ended_ms in (12_000, 3_600_000))

    assert jumped == stalled
    assert jumped.tokens_per_s > rate.tokens_per_s / 2
    assert jumped.after(apart(8000, 1.0, 60)).tokens_per_s == pytest.approx(rate.tokens_per_s, rel=0.1)


def test_an_engine_that_decodes_for_seconds_now_and_then_has_its_mean_rate() -> None:
    rate = prior()

    for _ in range(20):
        rate = rate.after(apart(8000, 1.0, 4) + apart(8000, 6.0, 1))

    assert rate.tokens_per_s == pytest.approx(4000.0, rel=0.2)


def test_without_a_limit_of_the_window_steps_are_still_believed_to_have_one() -> None:
    endless = PrefillRate.prior(InstanceLoad("a", InstanceState.READY, dispatch_window_tokens=1 << 60))

    assert endless.step_tokens == 16_384
    assert endless.tokens_per_s == pytest.approx(8000.0)


times = st.builds(
    lambda tokens, ends, began_ms, busy_ms: BusyTime(tokens, ends, began_ms, began_ms + busy_ms),
    st.integers(1, 200_000),
    st.just(1),
    st.integers(0, 1_000_000),
    st.integers(0, 10_000_000),
)


@given(seen=st.lists(times, max_size=40), tokens_per_s=st.floats(1.0, 1e9))
@settings(max_examples=100)
def test_whatever_it_is_told_the_rate_can_be_divided_by(seen: list[BusyTime], tokens_per_s: float) -> None:
    rate = prior(tokens_per_s)

    assert 1.0 <= rate.after(seen).tokens_per_s <= 60 * rate.tokens_per_s
