"""Requests that are passed on spread over instances without any store."""

from __future__ import annotations

from collections import Counter

from dualmap.scheduling.request.passed_on import PassedOnBalancer

READY = tuple(f"i{number}" for number in range(8))


def test_requests_in_flight_spread_evenly() -> None:
    balancer, taken = PassedOnBalancer(), Counter[str]()

    for _ in range(800):
        instance_id = balancer.pick(READY, frozenset())
        assert instance_id is not None
        balancer.enter(instance_id)
        taken[instance_id] += 1

    assert max(taken.values()) - min(taken.values()) <= 10


def test_a_busy_instance_is_given_less() -> None:
    balancer = PassedOnBalancer()
    for _ in range(100):
        balancer.enter("i0")

    assert "i0" not in {balancer.pick(READY, frozenset()) for _ in range(100)}


def test_avoided_instances_are_taken_only_if_nothing_else_is_asked_for() -> None:
    balancer = PassedOnBalancer()
    assert {balancer.pick(READY, frozenset(READY) - {"i5"}) for _ in range(20)} == {"i5"}
    assert balancer.pick(READY, frozenset(READY)) is None
    assert balancer.pick((), frozenset()) is None


def test_who_left_is_neither_favoured_nor_avoided() -> None:
    used, fresh = PassedOnBalancer(), PassedOnBalancer()
    used.enter("i0")
    used.leave("i0")

    assert [used.pick(READY, frozenset()) for _ in range(100)] == [fresh.pick(READY, frozenset()) for _ in range(100)]
