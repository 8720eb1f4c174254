"""The breakers of a pool on one replica."""

from __future__ import annotations

from router.ask import Outcome
from router.breakers import BreakerPanel
from scheduling.breaker import BreakerRule, BreakerState

RULE = BreakerRule(fault_limit=2, cooldown_s=5.0, max_cooldown_s=20.0)


def opened() -> BreakerPanel:
    panel = BreakerPanel(RULE)
    for _ in range(2):
        panel.failed("a", 0.0)
    return panel


def test_faults_in_a_row_block_an_instance_and_a_success_between_them_does_not() -> None:
    panel = BreakerPanel(RULE)
    panel.failed("a", 0.0)
    panel.succeeded("a")
    panel.failed("a", 0.0)
    assert panel.blocked(0.0) == frozenset()

    panel.failed("a", 0.0)

    assert panel.blocked(0.0) == {"a"}
    assert panel.states() == {"a": BreakerState.OPEN}


def test_after_the_cool_down_one_probe_goes_and_the_next_waits_for_it() -> None:
    panel = opened()
    assert panel.blocked(5.0) == frozenset()

    panel.sending("a", 5.0)

    assert panel.blocked(5.1) == {"a"}
    panel.judge("a", Outcome.COMPLETED, 5.2)
    assert panel.blocked(5.3) == frozenset()
    assert panel.states() == {}


def test_a_probe_without_evidence_leaves_its_place_to_another() -> None:
    panel = opened()
    panel.sending("a", 5.0)

    panel.judge("a", Outcome.CLIENT_GONE, 5.2)

    assert panel.blocked(5.3) == frozenset()
    assert panel.states() == {"a": BreakerState.HALF_OPEN}


def test_a_request_sent_against_an_open_breaker_is_no_probe() -> None:
    panel = opened()
    panel.sending("a", 1.0)
    assert panel.states() == {"a": BreakerState.OPEN}


def test_instances_that_left_are_forgotten() -> None:
    panel = opened()
    panel.forget_all_but({"b": None})
    assert panel.states() == {}
