from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.request.breaker import Breaker, BreakerEvent, BreakerRule, BreakerState, next_state

RULE = BreakerRule(fault_limit=3, cooldown_s=5.0, max_cooldown_s=30.0, trials=2, forgiving_s=60.0)

EVENTS = (
    BreakerEvent.SUCCESS,
    BreakerEvent.PROVEN,
    BreakerEvent.FAULT,
    BreakerEvent.EJECTED,
    BreakerEvent.COOLED,
    BreakerEvent.NEUTRAL,
)
EXPECTED = {
    #                        success, proven, fault, ejected, cooled, neutral
    BreakerState.CLOSED: ("closed", None, "closed", "open", None, "closed"),
    BreakerState.OPEN: ("open", None, "open", None, "half_open", "open"),
    BreakerState.HALF_OPEN: ("half_open", "closed", "open", None, "half_open", "half_open"),
}


@pytest.mark.parametrize(("state", "event"), list(product(BreakerState, BreakerEvent)))
def test_every_event_in_every_state_is_decided(state: BreakerState, event: BreakerEvent) -> None:
    expected = EXPECTED[state][EVENTS.index(event)]

    if expected is None:
        with pytest.raises(TransitionError):
            next_state(state, event)
    else:
        assert next_state(state, event) == expected


def opened(now_s: float = 100.0) -> Breaker:
    return Breaker(faults=2).failed(now_s, RULE, ejected=True)


def proven(breaker: Breaker, now_s: float) -> Breaker:
    """Back in service after its trials."""
    for _ in range(RULE.trials):
        breaker = breaker.sending(now_s, RULE).succeeded(now_s, RULE)
    assert breaker.state is BreakerState.CLOSED
    return breaker


def test_faults_that_are_no_reason_to_eject_are_counted_in_a_row() -> None:
    breaker = Breaker().failed(1.0, RULE, ejected=False).failed(2.0, RULE, ejected=False)
    assert (breaker.state, breaker.faults) == (BreakerState.CLOSED, 2)

    assert breaker.succeeded(3.0, RULE) == Breaker()
    assert breaker.failed(3.0, RULE, ejected=True).state is BreakerState.OPEN


def test_client_errors_do_not_excuse_faults() -> None:
    breaker = Breaker().failed(1.0, RULE, ejected=False)

    for _ in range(100):
        breaker = breaker.ended_without_evidence(3.0)

    assert (breaker.state, breaker.faults) == (BreakerState.CLOSED, 1)


def test_while_open_nothing_is_sent_until_it_has_cooled() -> None:
    breaker = opened(100.0)

    assert not breaker.allows(104.9)
    with pytest.raises(TransitionError, match=r"another 1\.0 s"):
        breaker.sending(104.0, RULE)
    assert breaker.allows(105.0)


def test_half_open_lets_the_next_trial_go_when_the_one_before_shows_a_token() -> None:
    trying = opened(100.0).sending(105.0, RULE)
    assert trying.state is BreakerState.HALF_OPEN
    assert not trying.allows(105.1)

    trying = trying.began(105.2, RULE)
    assert trying.allows(105.2)

    trying = trying.sending(105.2, RULE).began(105.3, RULE)
    assert not trying.allows(105.3), "no more trials are under way than have to succeed"


def test_enough_whole_answers_close_it() -> None:
    once = opened(100.0).sending(105.0, RULE).succeeded(106.0, RULE)
    assert once.state is BreakerState.HALF_OPEN
    assert once.allows(106.0)

    closed = once.sending(106.0, RULE).succeeded(107.0, RULE)

    assert (closed.state, closed.faults, closed.ejections) == (BreakerState.CLOSED, 0, 1)


def test_every_further_ejection_lasts_longer_up_to_a_bound() -> None:
    breaker, now_s, waits_s = opened(100.0), 100.0, []

    for _ in range(5):
        waits_s.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        breaker = breaker.sending(now_s, RULE).failed(now_s, RULE, ejected=False)

    assert waits_s == [5.0, 10.0, 20.0, 30.0, 30.0]


def test_an_instance_that_fails_again_after_its_trials_is_ejected_for_longer_until_it_is_forgiven() -> None:
    again = proven(opened(100.0), 105.0).failed(110.0, RULE, ejected=True)
    assert again.retry_at_s == 120.0

    closed = proven(again, 120.0)
    assert closed.failed(121.0, RULE, ejected=True).retry_at_s == 141.0
    assert closed.failed(120.0 + RULE.forgiving_s, RULE, ejected=True).retry_at_s == 180.0 + 10.0
    assert closed.failed(120.0 + 2 * RULE.forgiving_s, RULE, ejected=True).retry_at_s == 240.0 + 5.0
    assert not closed.is_new(121.0, RULE)
    assert closed.is_new(120.0 + 2 * RULE.forgiving_s, RULE)


def test_an_instance_that_stays_away_for_a_day_is_still_tried() -> None:
    breaker, now_s = opened(100.0), 100.0

    for _ in range(3000):
        now_s = breaker.retry_at_s
        breaker = breaker.sending(now_s, RULE).failed(now_s, RULE, ejected=False)

    assert breaker.retry_at_s - now_s == RULE.max_cooldown_s


def test_a_trial_whose_client_left_makes_room_for_another() -> None:
    assert opened(100.0).sending(105.0, RULE).ended_without_evidence(105.5).allows(105.5)


def test_a_trial_that_never_reports_back_blocks_for_one_cool_down_only() -> None:
    lost = opened(100.0).sending(105.0, RULE)

    assert lost.allows(110.0)
    assert lost.sending(110.0, RULE).state is BreakerState.HALF_OPEN


def test_answers_that_come_while_it_is_open_neither_close_nor_prolong_it() -> None:
    breaker = opened(100.0)

    assert breaker.succeeded(103.0, RULE) == breaker
    assert breaker.failed(103.0, RULE, ejected=False) == breaker


@given(st.lists(st.sampled_from(["success", "fault", "ejected", "neutral", "send", "began", "wait"]), max_size=60))
def test_whatever_happens_it_lets_somebody_try_again_within_the_longest_cool_down(steps: list[str]) -> None:
    breaker, now_s = Breaker(), 0.0
    for step in steps:
        if step == "success":
            breaker = breaker.succeeded(now_s, RULE)
        elif step in ("fault", "ejected"):
            breaker = breaker.failed(now_s, RULE, ejected=step == "ejected")
        elif step == "neutral":
            breaker = breaker.ended_without_evidence(now_s)
        elif step == "began":
            breaker = breaker.began(now_s, RULE)
        elif step == "send" and breaker.allows(now_s):
            breaker = breaker.sending(now_s, RULE)
        else:
            now_s += 1.7

        assert breaker.allows(now_s + RULE.max_cooldown_s)
