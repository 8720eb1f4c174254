"""The page lists the events between two readings of a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dualmap.router.pool.view import empty_view
from dualmap.router.ui.happenings import Reading, happenings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.statestore.call_values import Note, PoolOverview
from dualmap.statestore.leases import Lease, ReplicaInfo

READY = InstanceState.READY


def overview(*names: str, **changes: Any) -> PoolOverview:
    loads = {name: InstanceLoad(name, READY) for name in names}
    return replace(PoolOverview(1000, loads, (), None, {}, {}), **changes)


def told(before: PoolOverview, now: PoolOverview, *, hot: dict[int, int] | None = None) -> list[tuple[str, str]]:
    view = empty_view()
    return list(happenings(Reading.of(before, view), Reading.of(now, replace(view, tree=HotnessTree(hot or {})))))


def test_nothing_happened_between_two_equal_readings() -> None:
    assert told(overview("a"), overview("a")) == []


def test_instances_join_leave_and_change_their_state() -> None:
    down = {"a": InstanceLoad("a", InstanceState.DOWN), "c": InstanceLoad("c", READY)}

    assert told(overview("a", "b"), overview(loads=down)) == [
        ("scale", "c joined as ready"),
        ("scale", "b left the fleet"),
        ("trouble", "a: ready → down"),
    ]


def test_a_fleet_that_comes_up_at_once_is_one_line() -> None:
    [(kind, words)] = told(overview(), overview(*(f"instance-{number}" for number in range(500))))

    assert kind == "scale"
    assert words.startswith("500 instances changed")


def test_migrations_leaders_replicas_and_hot_prefixes_are_told() -> None:
    replica = ReplicaInfo("r", 60_000, 60_000, {})
    before = overview(migrations={"rebalance": 2}, leader=Lease("w1", 1, 9000))
    now = overview(migrations={"rebalance": 3, "drain": 2}, leader=Lease("w2", 2, 9000), replicas=(replica,))

    assert told(before, now, hot={1: 1, 2: 12}) == [
        ("replica", "replica r joined"),
        ("leader", "w2 leads"),
        ("migration", "1 held request moved: rebalance"),
        ("migration", "2 held requests moved: drain"),
        ("hot", "2 prefixes became hot, up to 12 blocks long"),
    ]
    assert told(now, overview()) == [("replica", "replica r is gone"), ("trouble", "w2 leads no more")]


def test_what_is_wrong_with_an_instance_is_told_when_it_is_found_and_when_it_changes() -> None:
    before = overview(notes={"a": Note("connection refused", 1), "b": Note("status 503", 1)})
    now = overview(notes={"a": Note("connection refused", 1), "b": Note("status 401", 2), "c": Note("TLS", 3)})

    assert told(before, now) == [("trouble", "b: status 401"), ("trouble", "c: TLS")]
    assert told(now, overview()) == []


def test_what_is_a_failure_is_told_as_one() -> None:
    ran_out, retired = (ReplicaInfo(name, expires_ms, 60_000, {}) for name, expires_ms in (("r", 900), ("s", 0)))
    alive = tuple(replace(each, expires_ms=60_000) for each in (ran_out, retired))
    down = {"a": InstanceLoad("a", InstanceState.DOWN)}

    assert told(overview(replicas=alive), overview(replicas=(ran_out, retired))) == [
        ("trouble", "replica r is gone: its lease ran out"),
        ("replica", "replica s is gone"),
    ]
    assert told(overview(loads=down), overview("a")) == [("good", "a: down → ready")]


def test_one_instance_that_fails_is_not_lost_among_many_that_come_back() -> None:
    names = [f"i-{number:02}" for number in range(20)]
    before = {name: InstanceLoad(name, InstanceState.DOWN) for name in names} | {"x": InstanceLoad("x", READY)}
    now = {name: InstanceLoad(name, READY) for name in names} | {"x": InstanceLoad("x", InstanceState.DOWN)}

    assert told(overview(loads=before), overview(loads=now)) == [
        ("good", "20 instances changed, one of them: i-00: down → ready"),
        ("trouble", "x: ready → down"),
    ]
