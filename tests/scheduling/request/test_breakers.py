"""Which instances of a pool a replica avoids."""

from __future__ import annotations

from typing import Any

from dualmap.scheduling.request.breaker import BreakerRule, BreakerState
from dualmap.scheduling.request.breakers import CONSECUTIVE, SHARE, CircuitBreakers
from dualmap.scheduling.request.evidence import Evidence
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.view import ClusterView

RULE = BreakerRule(fault_limit=2, cooldown_s=5.0, max_cooldown_s=20.0, trials=1)
BROKEN = InstanceFailure(FailureKind.TRUNCATED, "the stream ended before the answer did")


def view_of(*ready: str, down: str = "") -> ClusterView:
    instances = {name: InstanceSpec(name, f"http://{name}:1", state=InstanceState.READY) for name in ready}
    instances |= {name: InstanceSpec(name, f"http://{name}:1", state=InstanceState.DOWN) for name in down}
    return ClusterView.build(epoch=1, tree_version=1, instances=instances, tree=HotnessTree())


def opened(**how: Any) -> CircuitBreakers:
    breakers = CircuitBreakers(RULE, **how)
    for _ in range(2):
        breakers.failed("a", BROKEN, 0.0)
    return breakers


def test_faults_in_a_row_block_an_instance_and_a_success_between_them_does_not() -> None:
    breakers = CircuitBreakers(RULE)
    breakers.failed("a", BROKEN, 0.0)
    breakers.succeeded("a", 0.0)
    breakers.failed("a", BROKEN, 0.0)
    assert breakers.blocked(0.0) == frozenset()

    breakers.failed("a", BROKEN, 0.0)

    assert breakers.blocked(0.0) == {"a"}
    assert breakers.states() == {"a": BreakerState.OPEN}


def test_an_instance_that_fails_a_part_of_its_requests_is_ejected_by_its_share() -> None:
    warnings: list[str] = []
    reasons: list[tuple[str, str]] = []
    breakers = CircuitBreakers(
        BreakerRule(),
        on_fault=lambda instance_id, reason: reasons.append((instance_id, reason)),
        on_ejection=lambda instance_id, rule: reasons.append((instance_id, rule)),
        warn=warnings.append,
    )
    for _ in range(30):
        breakers.succeeded("b", 0.0)
    for number in range(12):
        if number % 3:
            breakers.succeeded("a", 0.0)
        else:
            breakers.failed("a", BROKEN, 0.0)

    assert breakers.blocked(0.0) == {"a"}
    assert reasons == [("a", "truncated")] * 3 + [("a", SHARE)] + [("a", "truncated")]
    assert "instance a is avoided for 5 s: 3 of its last 7 requests failed, 0.0 % of the others' did" in warnings[0]
    assert "truncated: the stream ended before the answer did" in warnings[0]


def test_where_all_fail_alike_only_faults_in_a_row_eject() -> None:
    breakers = CircuitBreakers(BreakerRule())
    for _ in range(40):
        for name in "abcd":
            breakers.failed(name, BROKEN, 0.0)
            breakers.succeeded(name, 0.0)
    assert breakers.states() == {}


def test_a_client_error_is_no_evidence_either_way() -> None:
    breakers = CircuitBreakers(RULE)
    breakers.failed("a", BROKEN, 0.0)
    for outcome in (Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE, Outcome.CUT_OFF):
        Evidence(breakers).ended("a", outcome, 0.0)
    assert breakers.blocked(0.0) == frozenset()

    breakers.failed("a", BROKEN, 0.0)
    assert breakers.blocked(0.0) == {"a"}


def test_after_the_cool_down_one_trial_goes_and_the_next_waits_for_it() -> None:
    warnings: list[str] = []
    breakers = opened(warn=warnings.append)
    assert breakers.blocked(5.0) == frozenset()

    breakers.sending("a", 5.0)

    assert breakers.blocked(5.1) == {"a"}
    breakers.succeeded("a", 5.2)
    assert breakers.blocked(5.3) == frozenset()
    assert breakers.states() == {}
    assert "instance a is back in service" in warnings[-1]


def test_a_trial_without_evidence_leaves_its_place_to_another() -> None:
    breakers = opened()
    breakers.sending("a", 5.0)

    breakers.ended_without_evidence("a", 5.2)

    assert breakers.blocked(5.3) == frozenset()
    assert breakers.states() == {"a": BreakerState.HALF_OPEN}


def test_a_request_sent_against_an_open_breaker_is_no_trial() -> None:
    breakers = opened()
    breakers.sending("a", 1.0)
    assert breakers.states() == {"a": BreakerState.OPEN}


def test_no_more_than_half_of_the_instances_in_service_are_ejected() -> None:
    ejections: list[tuple[str, str]] = []
    breakers = CircuitBreakers(
        RULE, view=lambda: view_of("a", "b", "c", "d", down="x"), on_ejection=lambda *each: ejections.append(each)
    )
    for name in "xabcd":  # what is down does not count
        for _ in range(4):
            breakers.failed(name, BROKEN, 0.0)

    assert breakers.blocked(0.0) == {"x", "a", "b"}
    assert breakers.failing() == {"x", "a", "b", "c", "d"}
    assert [each for each in ejections if each[0] != "x"] == [("a", CONSECUTIVE), ("b", CONSECUTIVE)]


def test_the_only_instance_is_never_ejected() -> None:
    assert opened(view=lambda: view_of("a")).blocked(0.0) == frozenset()


def test_when_most_are_out_because_others_left_none_is_avoided() -> None:
    views = [view_of("a", "b", "c", "d")]
    breakers = opened(view=lambda: views[-1])
    for _ in range(2):
        breakers.failed("b", BROKEN, 0.0)
    breakers.busy("c", 10.0, 0.0)
    assert breakers.blocked(1.0) == {"a", "b", "c"}
    assert not breakers.panics

    views.append(view_of("a", "b", down="cd"))

    assert breakers.panics
    assert breakers.blocked(1.0) == {"c"}, "a busy instance is left alone all the same"


def test_a_busy_instance_is_left_alone_for_as_long_as_it_says_and_is_not_broken() -> None:
    breakers = CircuitBreakers(RULE)
    for _ in range(20):
        breakers.busy("a", 7.0, 0.0)

    assert breakers.blocked(6.9) == {"a"}
    assert breakers.blocked(7.0) == frozenset()
    assert breakers.states() == {}
    avoided = breakers.avoided(1.0)["a"]
    assert (avoided.state, avoided.reason, avoided.for_s) == ("busy", "busy", 6.0)
    breakers.succeeded("a", 8.0)
    assert not breakers.troubled


def test_people_are_told_why_an_instance_is_avoided() -> None:
    breakers = CircuitBreakers(RULE)
    for _ in range(2):
        breakers.failed("a", InstanceFailure(FailureKind.STATUS, "", 401), 0.0)
    avoided = breakers.avoided(1.0)["a"]
    assert (avoided.state, avoided.reason, avoided.for_s) == ("open", "status_401", 4.0)


def test_instances_that_left_are_forgotten() -> None:
    breakers = opened()
    breakers.busy("c", 50.0, 0.0)
    breakers.forget_all_but({"b": None})
    assert breakers.states() == {}
    assert not breakers.troubled
