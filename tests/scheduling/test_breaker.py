from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.breaker import Breaker, BreakerEvent, BreakerRule, BreakerState, is_server_fault, next_state
from scheduling.errors import TransitionError

RULE = BreakerRule(fault_limit=3, cooldown_s=5.0, max_cooldown_s=30.0)

EXPECTED = {
    #                        success, fault, fault limit, cooled, neutral
    BreakerState.CLOSED: ("closed", "closed", "open", None, "closed"),
    BreakerState.OPEN: ("open", "open", "open", "half_open", "open"),
    BreakerState.HALF_OPEN: ("closed", "open", "open", "half_open", "half_open"),
}
EVENTS = (
    BreakerEvent.SUCCESS,
    BreakerEvent.FAULT,
    BreakerEvent.FAULT_LIMIT,
    BreakerEvent.COOLED,
    BreakerEvent.NEUTRAL,
)


@pytest.mark.parametrize(("state", "event"), list(product(BreakerState, BreakerEvent)))
def test_every_event_in_every_state_is_decided(state: BreakerState, event: BreakerEvent) -> None:
    expected = EXPECTED[state][EVENTS.index(event)]

    if expected is None:
        with pytest.raises(TransitionError):
            next_state(state, event)
    else:
        assert next_state(state, event) == expected


def opened(now_s: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(RULE.fault_limit):
        breaker = breaker.failed(now_s, RULE)
    return breaker


def test_faults_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    twice = Breaker().failed(1.0, RULE).failed(2.0, RULE)

    assert twice.failed(3.0, RULE).state is BreakerState.OPEN
    assert twice.succeeded().failed(3.0, RULE).state is BreakerState.CLOSED


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (None, True),
        (500, True),
        (503, True),
        (200, False),
        (400, False),
        (404, False),
        (429, False),
        (501, False),
        (505, False),
    ],
)
def test_only_server_faults_speak_against_an_instance(status: int | None, fault: bool) -> None:
    assert is_server_fault(status) is fault


def test_client_errors_never_open_it_and_do_not_excuse_faults() -> None:
    breaker = Breaker().failed(1.0, RULE).failed(2.0, RULE)

    for _ in range(100):
        breaker = breaker.ended_without_evidence(3.0)

    assert breaker.state is BreakerState.CLOSED
    assert breaker.failed(4.0, RULE).state is BreakerState.OPEN


def test_while_open_nothing_is_sent_until_it_has_cooled() -> None:
    breaker = opened(100.0)

    assert not breaker.allows(104.9)
    with pytest.raises(TransitionError, match=r"another 1\.0 s"):
        breaker.sending(104.0, RULE)
    assert breaker.allows(105.0)


def test_half_open_lets_one_probe_through_at_a_time() -> None:
    probing = opened(100.0).sending(105.0, RULE)

    assert probing.state is BreakerState.HALF_OPEN
    assert not probing.allows(105.1)


def test_a_good_probe_closes_it_and_forgets_the_past() -> None:
    assert opened(100.0).sending(105.0, RULE).succeeded() == Breaker()


def test_every_failed_probe_doubles_the_wait_up_to_a_bound() -> None:
    breaker, now_s, waits_s = opened(100.0), 100.0, []

    for _ in range(5):
        waits_s.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        breaker = breaker.sending(now_s, RULE).failed(now_s, RULE)

    assert waits_s == [5.0, 10.0, 20.0, 30.0, 30.0]


def test_an_instance_that_stays_away_for_a_day_is_still_tried() -> None:
    breaker, now_s = opened(100.0), 100.0

    for _ in range(3000):
        now_s = breaker.retry_at_s
        breaker = breaker.sending(now_s, RULE).failed(now_s, RULE)

    assert breaker.retry_at_s - now_s == RULE.max_cooldown_s


def test_a_probe_whose_client_left_makes_room_for_another() -> None:
    assert opened(100.0).sending(105.0, RULE).ended_without_evidence(105.5).allows(105.5)


def test_a_probe_that_never_reports_back_blocks_for_one_cool_down_only() -> None:
    lost = opened(100.0).sending(105.0, RULE)

    assert lost.allows(110.0)
    assert lost.sending(110.0, RULE).state is BreakerState.HALF_OPEN


def test_answers_that_come_while_it_is_open_neither_close_nor_prolong_it() -> None:
    breaker = opened(100.0)

    assert breaker.succeeded() == breaker
    assert breaker.failed(103.0, RULE) == breaker


def test_while_a_probe_is_under_way_any_answer_counts() -> None:
    probing = opened(100.0).sending(105.0, RULE)

    assert probing.succeeded().state is BreakerState.CLOSED
    assert probing.failed(105.1, RULE).retry_at_s == 115.1


@given(st.lists(st.sampled_from(["success", "fault", "neutral", "send", "wait"]), max_size=60))
def test_whatever_happens_it_lets_somebody_try_again_within_the_longest_cool_down(steps: list[str]) -> None:
    breaker, now_s = Breaker(), 0.0
    for step in steps:
        if step == "success":
            breaker = breaker.succeeded()
        elif step == "fault":
            breaker = breaker.failed(now_s, RULE)
        elif step == "neutral":
            breaker = breaker.ended_without_evidence(now_s)
        elif step == "send" and breaker.allows(now_s):
            breaker = breaker.sending(now_s, RULE)
        else:
            now_s += 1.7

        assert breaker.allows(now_s + RULE.max_cooldown_s)
