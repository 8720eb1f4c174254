"""The page names the problems of the fleet, in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router import errors
from dualmap.router.pool.view import empty_view
from dualmap.router.telemetry.traffic import TrafficCounts
from dualmap.router.ui.problems import (
    ADVICE,
    NAMED,
    FleetState,
    PoolState,
    Problem,
    Severity,
    Since,
    as_values,
    problems,
    troubles,
)
from dualmap.router.ui.status import Avoidance, ReplicaStatus
from dualmap.scheduling.scaling.scale_record import ScaleEntry
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.statestore.call_values import DiscoveryStatus, Note, PoolOverview
from dualmap.statestore.leases import OVERDUE_FIELD, Lease, ReplicaInfo

READY, DOWN, STARTING = InstanceState.READY, InstanceState.DOWN, InstanceState.STARTING
LEADER = Lease("w", 1, 60_000)
REPLICA = ReplicaInfo("r", 60_000, 60_000, {})


def pool(states: dict[str, InstanceState], roles: dict[str, Role] | None = None, **changes: Any) -> PoolState:
    loads = {name: InstanceLoad(name, state) for name, state in states.items()}
    specs = {
        name: InstanceSpec(name, f"http://{name}.test", role=(roles or {}).get(name, Role.MIXED), state=state)
        for name, state in states.items()
    }
    seen = PoolOverview(1000, loads, (REPLICA,), LEADER, {}, {})
    of_store = {name: changes.pop(name) for name in ("notes", "leader", "replicas", "loads") if name in changes}
    made = PoolState("default", replace(empty_view(), instances=specs), 5.0, replace(seen, **of_store))
    return replace(made, **changes)


def fleet(*pools: PoolState, recent: dict[Any, int] | None = None, **statuses: ReplicaStatus) -> FleetState:
    return FleetState("r", pools, {"r": ReplicaStatus(), **statuses}, Counter(recent or {}))


def found(state: FleetState) -> list[Problem]:
    """All problems; each has a headline, an advice, and no braces left of a template."""
    listed = problems(state)
    assert all(each.what and each.advice and "{" not in each.advice for each in listed)
    assert len({each.key for each in listed}) == len(listed)
    return listed


def test_a_fleet_that_is_well_has_no_problem() -> None:
    spare = {"a": READY, "b": InstanceState.STANDBY, "c": InstanceState.DRAINING, "d": STARTING}

    assert found(fleet(pool(spare))) == []


def test_an_instance_that_is_down_is_named_with_its_reason_since_when_and_where_to_look() -> None:
    noted = {"b": Note("connection refused", 17)}

    [down] = found(fleet(pool({"a": READY, "b": DOWN}, notes=noted)))

    assert (down.severity, down.what, down.why, down.since_ms) == (
        Severity.CRITICAL, "b is down", "connection refused", 17,
    )  # fmt: skip
    assert "http://b.test" in down.advice


def test_every_reason_that_is_known_of_an_instance_is_in_its_one_problem() -> None:
    avoiding = ReplicaStatus(avoided={"default": {"a": Avoidance("open", "status_500", 12.0)}})
    recent = {("fault", "default", "a", "status_500"): 4, ("fault", "default", "a", "closed"): 1}
    noted = {"a": Note("it lists m, and not n", 1)}

    [problem] = found(fleet(pool({"a": READY, "b": READY}, notes=noted), recent=recent, r=avoiding, s=avoiding))

    assert problem.what == "a is ejected by 2 of 2 replicas"
    for words in ("it lists m", "status_500, tried again in 12 s", "5 faults in the last minute", "status_500 × 4"):
        assert words in problem.why


@pytest.mark.parametrize(
    ("state", "what", "severity"),
    [
        (fleet(pool({"a": READY}, notes={"a": Note("status 401", -9000)})), "a is in trouble", Severity.WARNING),
        (fleet(pool({"a": READY}, notes={"a": Note("no answer within 1 s", 900)})), "a is in trouble",
         Severity.NOTICE),
        (fleet(pool({"a": READY, "b": STARTING}, notes={"b": Note("refused", 900)})), "b is not ready yet",
         Severity.NOTICE),
        (fleet(pool({"a": READY, "b": STARTING}, notes={"b": Note("refused", -400_000)})), "b is not ready yet",
         Severity.WARNING),
        (fleet(pool({"a": READY}, loads={"a": InstanceLoad("a", READY, stalled_s=12)})), "a stalls", Severity.WARNING),
        (fleet(pool({"a": READY}), recent={("fault", "default", "a", "closed"): 3}), "a fails requests",
         Severity.WARNING),
        (fleet(pool({"a": READY}), r=ReplicaStatus(avoided={"default": {"a": Avoidance("busy", "busy", 3)}})),
         "a says that it is busy", Severity.NOTICE),
        (fleet(pool({"a": DOWN})), "No instance is ready", Severity.CRITICAL),
        (fleet(pool({})), "No instance", Severity.CRITICAL),
        (fleet(pool({"a": READY, "b": DOWN}, {"a": Role.PREFILL, "b": Role.DECODE})), "No decode instance is ready",
         Severity.CRITICAL),
        (fleet(pool({"a": READY}, leader=None)), "No worker leads", Severity.CRITICAL),
        (fleet(pool({"a": READY}, overview=None), r=ReplicaStatus(stores={"default": "local"})),
         "The store is away: this replica decides alone", Severity.CRITICAL),
        (fleet(pool({"a": READY}, overview=None), r=ReplicaStatus(stores={"default": "local"}),
               s=ReplicaStatus(stores={"default": "local"})),
         "The store is away: 2 of 2 replicas decide alone", Severity.CRITICAL),
        (fleet(pool({"a": READY}), s=ReplicaStatus(stores={"default": "local"})), "Replica s decides alone",
         Severity.WARNING),
        (fleet(pool({"a": READY}, replicas=(REPLICA, ReplicaInfo("s", 500, 6000, {})))), "Replica s is gone",
         Severity.WARNING),
        (fleet(pool({"a": READY}, replicas=(REPLICA, replace(REPLICA, replica_id="s"))),
               r=ReplicaStatus(unreachable={"s": "no answer within 2 s"})), "Replica s cannot be reached by r",
         Severity.WARNING),
        (fleet(pool({"a": READY}, replicas=tuple(
            ReplicaInfo(name, 60_000, 60_000, {"scheduling": name}) for name in ("r", "s")))),
         "Replicas differ in their scheduling settings", Severity.WARNING),
        (fleet(pool({"a": READY}, replicas=(replace(REPLICA, info={"tokens": "mistrusted (bytes)"}),))),
         "Token counts of replica r are mistrusted", Severity.WARNING),
        (fleet(pool({"a": READY}), r=ReplicaStatus(panics=("default",))), "Ejections of pool default are ignored",
         Severity.CRITICAL),
        (fleet(pool({"a": READY}), r=ReplicaStatus(contested={"m": ["x", "y"]})), "Model m is of several pools",
         Severity.WARNING),
        (fleet(pool({"a": READY}), r=ReplicaStatus(certificates={"router.tls_certificate": "it expired"})),
         "The certificate of router.tls_certificate at replica r needs attention", Severity.CRITICAL),
        (fleet(pool({"a": READY}, recent=TrafficCounts(ended=1000, failed=2))),
         "2 requests failed in the last minute, of 1,000", Severity.WARNING),
        (fleet(pool({"a": READY}, recent=TrafficCounts(ended=10, failed=2))),
         "2 requests failed in the last minute, of 10", Severity.CRITICAL),
        (fleet(pool({"a": READY}, recent=TrafficCounts(on_time=30, late=10))), "25 % of requests are not on time",
         Severity.WARNING),
        (fleet(pool({"a": READY}, scaled=ScaleEntry(9, 1, "failed", "the webhook answers 500"))),
         "The last scale step failed", Severity.WARNING),
        (fleet(pool({"a": READY}), recent={("refusal", "queue_full"): 1200}),
         "1,200 requests refused in the last minute: queue_full", Severity.WARNING),
        (fleet(pool({"a": READY}), recent={("refusal", "invalid_request"): 1}),
         "1 request refused in the last minute: invalid_request", Severity.NOTICE),
    ],
)  # fmt: skip
def test_each_kind_of_problem_is_said(state: FleetState, what: str, severity: Severity) -> None:
    assert (what, severity) in [(each.what, each.severity) for each in found(state)]


def test_an_overload_is_said_first_with_what_arrives_what_is_served_and_what_waits() -> None:
    recent = TrafficCounts(on_time=20, late=80, arrived=2460, answered=1440, failed=3, ended=1500)
    behind = {name: InstanceLoad(name, READY, pending_tokens=560_000, queued_requests=48) for name in "abcd"}
    waiting = (replace(REPLICA, info={OVERDUE_FIELD: "120"}),)
    state = pool(dict.fromkeys("abcd", READY), loads=behind, recent=recent, replicas=waiting, leader=None)

    first, *_ = found(fleet(state, recent={("refusal", "no_instance"): 5}))

    assert (first.what, first.severity) == ("Overload: 80 % of requests are not on time", Severity.CRITICAL)
    for words in ("41.0 requests/s arrive and 24.0/s are answered", "192 held, 120 overdue", "4 of 4 instances"):
        assert words in first.why


def test_tenants_at_their_limits_are_named_with_the_limits_that_they_met() -> None:
    met = {
        ("limited", "acme/tokens_per_minute"): 120, ("limited", "acme/requests_per_day/key:ci"): 3,
        ("limited", "beta/requests_in_flight"): 1, ("refusal", "rate_limit_exceeded"): 124,
    }  # fmt: skip

    acme, beta = found(fleet(pool({"a": READY}), recent=met))

    assert (acme.what, acme.severity) == ("Tenant acme is at its limit", Severity.NOTICE)
    assert acme.why.startswith("tokens_per_minute refused 120 requests, requests_per_day for key:ci refused 3 requests")
    assert "dualmap tenants set acme" in acme.advice
    assert (beta.what, beta.why) == (
        "Tenant beta is at its limit", "requests_in_flight refused 1 request in the last minute",
    )  # fmt: skip


def test_an_overload_is_said_before_anybody_has_left_or_been_served() -> None:
    behind = {name: InstanceLoad(name, READY, pending_tokens=560_000, queued_requests=48) for name in "ab"}
    waiting = (replace(REPLICA, info={OVERDUE_FIELD: "1"}),)

    [overload] = found(fleet(pool(dict.fromkeys("ab", READY), loads=behind, replicas=waiting)))
    assert overload.what == "Overload: 1 request is overdue"

    [late] = found(fleet(pool({"a": READY}, replicas=(replace(REPLICA, info={OVERDUE_FIELD: "30"}),))))
    assert late.what == "30 requests are overdue"


def test_a_late_fleet_is_told_apart_from_one_late_instance() -> None:
    slow = TrafficCounts(on_time=30, late=10)
    behind = {name: InstanceLoad(name, READY, pending_tokens=80_000) for name in "abc"}
    idle = {name: InstanceLoad(name, READY) for name in "abc"}
    everyone = pool(dict.fromkeys("abc", READY), loads=behind, recent=slow)
    one = pool(dict.fromkeys("abc", READY), loads=idle | {"b": behind["b"]}, recent=slow)

    [all_late], [one_late] = found(fleet(everyone)), found(fleet(one))

    assert (all_late.what, all_late.severity) == ("Overload: 25 % of requests are not on time", Severity.WARNING)
    assert "3 of 3 instances have more work ahead" in all_late.why
    for words in ("too small", "instances add", "max_deferred_s", "autoscale"):
        assert words in all_late.advice
    assert "; b has more work ahead" in one_late.why


def test_the_worst_comes_first() -> None:
    state = fleet(
        pool({"a": READY, "b": DOWN, "c": READY}, notes={"c": Note("status 401", -9000)}),
        recent={("refusal", "invalid_api_key"): 7, ("refusal", "queue_full"): 1},
    )

    severities = [each.severity for each in found(state)]

    assert severities == sorted(severities, key=list(Severity).index)
    assert set(severities) == set(Severity)


def test_many_instances_with_the_same_problem_share_a_line() -> None:
    names = [f"vllm-{number:02}" for number in range(NAMED + 8)]
    noted = {name: Note("connection refused", 5) for name in names}
    state = fleet(pool({"ok": READY} | dict.fromkeys(names, DOWN), notes=noted))

    [line] = found(state)

    assert line.what == f"{NAMED + 8} instances are down"
    assert line.instances == tuple(names)
    assert "vllm-00, vllm-01, vllm-02 and 8 more. vllm-00: connection refused" in line.why
    assert len(troubles(state, state.pools[0])) == len(names), "each row still has its own"


def test_problems_of_one_of_several_pools_name_it() -> None:
    other = replace(pool({"b": DOWN}), name="other")

    assert {each.what for each in found(fleet(pool({"a": READY}), other))} == {
        "Pool other: No instance is ready",
        "Pool other: b is down",
    }


def test_every_refusal_that_an_operator_can_change_has_its_advice() -> None:
    ours = {
        each.code
        for each in errors.RouterError.__subclasses__()
        if each.status in (401, 403, 422, 429) or each.status >= 500
    }

    assert ours - {"upstream_failed", "upstream_timeout"} <= ADVICE.keys()


def test_since_when_is_kept_while_it_lasts_and_unknown_at_the_first_reading() -> None:
    since = Since()
    one, two = (Problem(key, Severity.WARNING, key) for key in ("one", "two"))

    assert since.of([one], 10.0) == {"one": (10.0, True)}
    assert since.of([one, two], 11.0) == {"one": (10.0, True), "two": (11.0, False)}
    assert since.of([two], 12.0) == {"two": (11.0, False)}
    first = since.of([one], 13.0)
    assert first == {"one": (13.0, False)}
    [plain] = as_values([replace(one, since_ms=5000)], first)
    assert (plain["since_s"], plain["or_longer"]) == (5.0, False)


def test_discovery_that_fails_is_a_warning_with_its_reason_and_what_it_leaves_out_is_a_notice() -> None:
    failing = DiscoveryStatus(17, "w", "pods", "failing", "403 pods is forbidden", left_out=("vllm-1: no port",))

    [problem] = found(fleet(pool({"a": READY}, discovery=failing)))
    assert (problem.severity, problem.since_ms) == (Severity.WARNING, 17)
    assert "403 pods is forbidden" in problem.why

    left = replace(failing, state="watching", detail="", left_out=tuple(f"p{number}: no port" for number in range(5)))
    [problem] = found(fleet(pool({"a": READY}, discovery=left)))
    assert problem.severity is Severity.NOTICE
    assert "p0: no port" in problem.why and "2 more" in problem.why and "p4" not in problem.why


@pytest.mark.parametrize("states", [{}, {"a": InstanceState.STANDBY}])
def test_a_pool_that_may_have_no_instance_is_well_without_one(states: dict[str, InstanceState]) -> None:
    [problem] = found(fleet(pool(states, may_be_empty=True)))
    assert (problem.severity, problem.what) == (Severity.NOTICE, "No instance runs")

    [problem] = found(fleet(pool(states)))
    assert problem.severity is Severity.CRITICAL
