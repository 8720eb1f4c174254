"""Moore-Hodgson against brute force, and the promises of stepping behind."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queue_order import (
    Plan,
    Waiting,
    behind_tokens,
    has_room_to_spare,
    is_calm,
    is_overdue,
    is_surplus,
    plan_on_time,
    step_rest_tokens,
    steps_behind,
)

TOKENS_PER_S = 1000.0  # one token per millisecond

queues = st.lists(
    st.builds(Waiting, deadline_ms=st.integers(1, 60), uncached_tokens=st.integers(1, 30)), min_size=1, max_size=6
).map(sorted)


def on_time(order: list[Waiting], dispatched_tokens: int) -> int:
    end_ms, count = dispatched_tokens, 0
    for request in order:
        end_ms += request.uncached_tokens
        count += end_ms <= request.deadline_ms
    return count


@given(queues, st.integers(0, 20))
def test_granting_by_the_rule_keeps_as_many_on_time_as_any_order_could(queue: list[Waiting], dispatched: int) -> None:
    # given the best that any order of the queue reaches
    best = max(on_time(list(order), dispatched) for order in permutations(queue))
    # when the queue is emptied pick by pick, each behind what was granted before
    left, granted, ahead = list(queue), [], dispatched
    while left:
        request = left.pop(plan_on_time(left, 0, ahead, TOKENS_PER_S).first)
        granted.append(request)
        ahead += request.uncached_tokens
    # then as many are on time
    assert on_time(granted, dispatched) == best


def test_the_longest_steps_aside_for_two_that_fit() -> None:
    queue = [Waiting(100, 90), Waiting(110, 40), Waiting(120, 40)]
    assert plan_on_time(queue, 0, 0, TOKENS_PER_S) == Plan(1, aside_tokens=90)


def test_when_nobody_can_make_it_the_shortest_is_the_likeliest() -> None:
    queue = [Waiting(10, 30), Waiting(11, 20), Waiting(12, 20)]
    assert plan_on_time(queue, 0, 50, TOKENS_PER_S) == Plan(1, aside_tokens=70)


@pytest.mark.parametrize(("earliest_deadline_ms", "calm"), [(3_000, True), (2_999, False)])
def test_it_is_calm_while_all_the_work_ends_before_the_earliest_deadline(earliest_deadline_ms: int, calm: bool) -> None:
    assert is_calm(earliest_deadline_ms, 1_000, on_time_tokens=200, tokens_per_s=100.0) is calm


@pytest.mark.parametrize(("now_ms", "behind"), [(60, False), (61, True)])
def test_a_request_steps_behind_once_it_would_be_late_even_if_it_were_next(now_ms: int, behind: bool) -> None:
    assert steps_behind(Waiting(100, 40), now_ms, 0, TOKENS_PER_S) is behind
    assert steps_behind(Waiting(100, 30), now_ms, 10, TOKENS_PER_S) is behind


@pytest.mark.parametrize(("other_tokens", "rest_tokens"), [(0, 0), (900, 900), (5_000, 1_024)])
def test_the_rest_of_a_step_is_half_of_it_or_what_others_have_to_do(other_tokens: int, rest_tokens: int) -> None:
    assert step_rest_tokens(4096, other_tokens) == rest_tokens


@pytest.mark.parametrize(
    ("dispatched_tokens", "kv_demand", "to_spare"), [(0, 0.999, True), (0, 1.0, False), (1, 0.0, False)]
)
def test_late_work_needs_an_engine_without_prefill_and_some_of_its_kv_memory(
    dispatched_tokens: int, kv_demand: float, to_spare: bool
) -> None:
    assert has_room_to_spare(dispatched_tokens, kv_demand) is to_spare


@pytest.mark.parametrize(("now_ms", "overdue"), [(1099, False), (1100, True)])
def test_a_request_is_overdue_once_it_was_held_for_the_longest_allowed_time(now_ms: int, overdue: bool) -> None:
    assert is_overdue(100, now_ms, 1000) is overdue


@pytest.mark.parametrize(("aside_tokens", "behind"), [(0, 100), (250, 350), (900, 500)])
def test_what_was_set_aside_counts_as_far_as_it_still_waits(aside_tokens: int, behind: int) -> None:
    assert behind_tokens(1000, dispatched_tokens=500, late_tokens=100, aside_tokens=aside_tokens) == behind


@pytest.mark.parametrize(
    ("late_tokens", "overdue_work_ms", "surplus"),
    [(0, 0.0, False), (1_999, 0.0, False), (2_000, 0.0, True), (500, 14_999.0, False), (500, 15_000.0, True)],
)
def test_who_steps_behind_is_surplus_once_the_late_work_is_at_its_limit(
    late_tokens: int, overdue_work_ms: float, surplus: bool
) -> None:
    assert is_surplus(late_tokens, 100.0, overdue_work_ms, max_late_work_ms=20_000) is surplus
