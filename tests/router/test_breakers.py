"""The breakers of a pool on one replica."""

from __future__ import annotations

from router.breakers import CircuitBreakers
from router.outcome import Outcome
from scheduling.breaker import BreakerRule, BreakerState

RULE = BreakerRule(fault_limit=2, cooldown_s=5.0, max_cooldown_s=20.0)


def opened() -> CircuitBreakers:
    breakers = CircuitBreakers(RULE)
    for _ in range(2):
        breakers.failed("a", 0.0)
    return breakers


def test_faults_in_a_row_block_an_instance_and_a_success_between_them_does_not() -> None:
    breakers = CircuitBreakers(RULE)
    breakers.failed("a", 0.0)
    breakers.succeeded("a")
    breakers.failed("a", 0.0)
    assert breakers.blocked(0.0) == frozenset()

    breakers.failed("a", 0.0)

    assert breakers.blocked(0.0) == {"a"}
    assert breakers.states() == {"a": BreakerState.OPEN}


def test_after_the_cool_down_one_probe_goes_and_the_next_waits_for_it() -> None:
    breakers = opened()
    assert breakers.blocked(5.0) == frozenset()

    breakers.sending("a", 5.0)

    assert breakers.blocked(5.1) == {"a"}
    breakers.record("a", Outcome.COMPLETED, 5.2)
    assert breakers.blocked(5.3) == frozenset()
    assert breakers.states() == {}


def test_a_probe_without_evidence_leaves_its_place_to_another() -> None:
    breakers = opened()
    breakers.sending("a", 5.0)

    breakers.record("a", Outcome.CLIENT_GONE, 5.2)

    assert breakers.blocked(5.3) == frozenset()
    assert breakers.states() == {"a": BreakerState.HALF_OPEN}


def test_a_request_sent_against_an_open_breaker_is_no_probe() -> None:
    breakers = opened()
    breakers.sending("a", 1.0)
    assert breakers.states() == {"a": BreakerState.OPEN}


def test_instances_that_left_are_forgotten() -> None:
    breakers = opened()
    breakers.forget_all_but({"b": None})
    assert breakers.states() == {}
