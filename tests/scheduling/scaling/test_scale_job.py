"""The scaling round, driven by hand: what it records, whom it starts and drains, and what it does when things fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dualmap.scheduling.scaling.scale_job import MAX_CALLS, OTHERS_TERM_MS, ActuatorReply, FleetNow, ScaleKeeper
from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan, ScalePlanner, ScaleRule
from dualmap.scheduling.scaling.scale_record import DecisionStatus, ScaleEntry, ScaleRecord
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.steps import at_once, drive_now

READY, STANDBY, STARTING = InstanceState.READY, InstanceState.STANDBY, InstanceState.STARTING
DRAINING, DOWN = InstanceState.DRAINING, InstanceState.DOWN


@dataclass
class HandPlan:
    """Wants what the test says."""

    wanted: int | None = None

    def observe(self, now: FleetFigures) -> None:
        self.now = now

    def plan(self) -> Plan:
        return Plan(self.now.size if self.wanted is None else self.wanted, "as the test says")


@dataclass
class HandFleet:
    """The figures that a round sees, and the calls that it made."""

    states: dict[str, InstanceState]
    record: ScaleRecord = field(default_factory=ScaleRecord)
    replies: list[ActuatorReply | None] = field(default_factory=list)
    log: list[ScaleEntry] = field(default_factory=list)
    asked: list[ScaleRecord] = field(default_factory=list)
    now_ms: int = 1_000_000
    waiting: int = 0
    live: int = 0
    ended: int = 0
    dies_after: str = ""
    """An event after whose record the leader dies."""
    roles: dict[str, Role] = field(default_factory=dict)
    """Roles of instances that are not mixed."""

    async def now(self) -> FleetNow:
        specs = {
            name: InstanceSpec(name, f"http://{name}", state=state, role=self.roles.get(name, Role.MIXED))
            for name, state in self.states.items()
        }
        loads = {name: InstanceLoad(name, state) for name, state in self.states.items()}
        return FleetNow(self.now_ms, loads, specs, self.waiting, self.live, self.ended)

    async def scaling(self, role: str) -> ScaleRecord:
        return self.record if self.record.role == role else ScaleRecord(role=role)

    async def record_scaling(self, record: ScaleRecord, entry: ScaleEntry) -> None:
        self.record = record
        self.log.append(entry)
        if entry.event == self.dies_after:
            raise LeaderDiedError

    async def recent_blocks(self, names: Sequence[str], limit: int) -> dict[str, Sequence[int]]:
        return dict.fromkeys(names, ())

    async def set_instance_state(self, name: str, state: InstanceState, *, expected: InstanceState) -> bool:
        if self.states[name] is not expected:
            return False
        self.states[name] = state
        return True

    async def actuate(self, record: ScaleRecord) -> ActuatorReply | None:
        self.asked.append(record)
        return self.replies.pop(0)

    @property
    def events(self) -> list[str]:
        return [entry.event for entry in self.log]


class LeaderDiedError(Exception):
    pass


def keeper(
    plan: HandPlan,
    worker: str = "w1",
    spares: tuple[str, ...] = ("s1", "s2"),
    *,
    decodes: bool = False,
    **given: Any,
) -> ScaleKeeper:
    settings = AutoscaleSettings(**{"min_instances": 1, "max_instances": 9, "start_s": 10.0, **given})
    return ScaleKeeper(settings, worker, 5.0, 128, spares, planner=plan, decodes=decodes)


def tick(made: ScaleKeeper, fleet: HandFleet, seconds: int = 1) -> ScaleRecord:
    for _ in range(seconds):
        fleet.now_ms += 1000
        record = drive_now(made.tick(), fleet)
    return record


def webhook(**given: Any) -> dict[str, Any]:
    return {"actuator": "webhook", "webhook_url": "http://hook", "webhook_secret": "x", **given}


def test_the_plan_keeps_the_bounds_and_the_margin_of_the_settings() -> None:
    made = ScaleKeeper(AutoscaleSettings(min_instances=2, max_instances=6, margin=0.5), "w1", 5.0, 128)
    assert isinstance(made.planner, ScalePlanner)
    assert made.planner.rule == ScaleRule(2, 6, 0.5)


def test_a_step_up_starts_spares_and_is_done_when_they_are_ready() -> None:
    plan, fleet = HandPlan(), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY, "parked": STANDBY})
    made = keeper(plan)
    assert tick(made, fleet).decision_id == 0

    plan.wanted = 3
    assert tick(made, fleet).starting == ("s1", "s2")
    assert fleet.states == {"a": READY, "s1": STARTING, "s2": STARTING, "parked": STANDBY}
    fleet.states |= {"s1": READY, "s2": READY}
    record = tick(made, fleet)

    assert (record.status, record.decision_id) == (DecisionStatus.DONE, 1)
    assert fleet.events == ["decided", "done"]
    assert fleet.log[0].text == "1 -> 3: as the test says; starts s1, s2"


def test_an_instance_that_an_operator_parked_is_never_started() -> None:
    plan, fleet = HandPlan(3), HandFleet({"a": READY, "parked": STANDBY})
    tick(keeper(plan, spares=()), fleet, 5)
    assert fleet.states["parked"] is STANDBY
    assert fleet.log == []


def test_one_that_was_started_and_that_an_operator_drains_then_is_no_spare_any_more() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY})
    made = keeper(plan, spares=("s1",))
    tick(made, fleet)
    fleet.states["s1"] = READY
    tick(made, fleet)
    fleet.states["s1"] = STANDBY
    tick(made, fleet, 5)
    assert fleet.states["s1"] is STANDBY
    assert fleet.record.spares == ()


def test_a_step_down_drains_one_and_it_is_a_spare_afterwards() -> None:
    plan, fleet = HandPlan(1), HandFleet({"a": READY, "b": READY})
    made = keeper(plan, spares=())
    assert tick(made, fleet).leaving == ("a",)
    assert fleet.states["a"] is DRAINING
    tick(made, fleet, 3)
    assert fleet.record.is_open
    fleet.states["a"] = STANDBY
    record = tick(made, fleet)
    assert record.status is DecisionStatus.DONE
    assert record.spares == ("a",)
    plan.wanted = 2
    tick(made, fleet)
    assert fleet.states["a"] is STARTING


def test_a_drain_is_taken_back_when_the_load_returns() -> None:
    plan, fleet = HandPlan(1), HandFleet({"a": READY, "b": READY})
    made = keeper(plan)
    tick(made, fleet)
    assert fleet.states["a"] is DRAINING
    plan.wanted = 2
    assert tick(made, fleet).status is DecisionStatus.WITHDRAWN
    assert fleet.states["a"] is READY


@pytest.mark.parametrize("gone", [STANDBY, DOWN, None])
def test_an_instance_that_dies_while_draining_ends_the_drain(gone: InstanceState | None) -> None:
    plan, fleet = HandPlan(1), HandFleet({"a": READY, "b": READY})
    made = keeper(plan)
    tick(made, fleet)
    if gone is None:
        del fleet.states["a"]
    else:
        fleet.states["a"] = gone
    assert tick(made, fleet).status is DecisionStatus.DONE
    assert fleet.states["b"] is READY


def test_the_next_leader_carries_out_what_the_dead_one_decided_and_decides_nothing_twice() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY}, dies_after="decided")
    with pytest.raises(LeaderDiedError):
        tick(keeper(plan, "w1"), fleet)
    assert fleet.states["s1"] is STANDBY
    fleet.dies_after = ""

    second = keeper(plan, "w2")
    tick(second, fleet, 3)

    assert fleet.states == {"a": READY, "s1": STARTING, "s2": STANDBY}
    assert fleet.events == ["decided"]
    fleet.states["s1"] = READY
    assert tick(second, fleet).status is DecisionStatus.DONE


def test_a_leader_that_dies_after_acting_leaves_nothing_to_repeat() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY})
    tick(keeper(plan, "w1"), fleet)
    tick(keeper(plan, "w2"), fleet, 3)
    assert fleet.states == {"a": READY, "s1": STARTING, "s2": STANDBY}
    assert fleet.events == ["decided"]


def test_an_instance_that_never_becomes_ready_is_parked_and_another_one_is_tried() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY})
    made = keeper(plan)
    tick(made, fleet, 42)
    assert fleet.record.status is DecisionStatus.FAILED
    assert "s1 not ready" in fleet.record.outcome
    assert fleet.states == {"a": READY, "s1": STANDBY, "s2": STANDBY}
    tick(made, fleet, 30)
    assert fleet.states["s2"] is STARTING
    assert fleet.states["s1"] is STANDBY


def test_a_start_that_dies_frees_the_decision_at_once() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY})
    made = keeper(plan)
    tick(made, fleet)
    fleet.states["s1"] = DOWN
    assert tick(made, fleet).status is DecisionStatus.FAILED


def test_an_actuator_that_fails_is_asked_again_and_given_up_after_some_times() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY})
    fleet.replies = [ActuatorReply(False, "503")] * MAX_CALLS
    made = keeper(plan, spares=(), **webhook())
    record = tick(made, fleet, MAX_CALLS)
    assert record.status is DecisionStatus.FAILED
    assert "5 times: 503" in record.outcome
    assert {each.decision_id for each in fleet.asked} == {1}


def test_an_actuator_that_hangs_is_waited_for_no_longer_than_a_start_takes() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY})
    fleet.replies = [None] * 60
    made = keeper(plan, spares=(), **webhook())
    tick(made, fleet, 45)
    assert fleet.record.status is DecisionStatus.FAILED


def test_an_actuator_that_lies_is_found_out() -> None:
    plan, fleet = HandPlan(3), HandFleet({"a": READY})
    fleet.replies = [ActuatorReply(True, "created")]
    made = keeper(plan, spares=(), **webhook())
    tick(made, fleet, 45)
    assert fleet.events == ["decided", "accepted", "failed"]
    assert "2 did not come" in fleet.record.outcome


def test_instances_that_a_webhook_starts_end_the_decision_when_they_are_ready() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY})
    fleet.replies = [ActuatorReply(True)]
    made = keeper(plan, spares=(), **webhook())
    tick(made, fleet, 3)
    fleet.states["new"] = STARTING
    tick(made, fleet)
    assert fleet.record.is_open
    fleet.states["new"] = READY
    assert tick(made, fleet).status is DecisionStatus.DONE
    assert len(fleet.asked) == 1


def test_a_webhook_hears_of_the_instances_that_left_after_they_are_empty() -> None:
    plan, fleet = HandPlan(1), HandFleet({"a": READY, "b": READY})
    fleet.replies = [ActuatorReply(True)]
    made = keeper(plan, spares=(), **webhook())
    tick(made, fleet, 3)
    assert fleet.asked == []
    fleet.states["a"] = STANDBY
    assert tick(made, fleet).status is DecisionStatus.DONE
    assert fleet.asked[0].leaving == ("a",)


def test_without_an_actuator_the_number_is_published_and_nothing_is_touched() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY})
    made = keeper(plan, actuator="none")
    record = tick(made, fleet, 20)
    assert (record.wanted, record.status) == (2, DecisionStatus.PUBLISHED)
    assert fleet.states == {"a": READY, "s1": STANDBY}
    assert fleet.events == ["decided"]


def test_two_fleets_with_other_bounds_on_one_pool_do_not_fight() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY})
    tick(keeper(plan, "one"), fleet)
    fleet.states["s1"] = READY
    tick(keeper(plan, "one"), fleet)
    other = HandPlan(1)
    second = keeper(other, "two", min_instances=1, max_instances=1)
    tick(second, fleet, OTHERS_TERM_MS // 1000 - 5)
    assert fleet.states["s1"] is READY
    assert "one decided with other bounds" in str(second.hands_off)


def test_more_load_during_a_start_starts_more() -> None:
    plan, fleet = HandPlan(2), HandFleet({"a": READY, "s1": STANDBY, "s2": STANDBY})
    made = keeper(plan)
    tick(made, fleet)
    plan.wanted = 3
    tick(made, fleet, 3)
    assert fleet.states == {"a": READY, "s1": STARTING, "s2": STARTING}


def test_the_work_that_arrived_is_what_the_decayed_sums_gained() -> None:
    plan, fleet = HandPlan(), HandFleet({"a": READY})
    made = keeper(plan)
    tick(made, fleet)
    whole = at_once(fleet.now())
    grown = replace(whole.loads["a"], window_tokens=4000.0, prefill_tokens_per_s=1000.0)
    fleet.now_ms += 1000

    async def later() -> FleetNow:
        return FleetNow(fleet.now_ms, {"a": grown}, whole.instances)

    fleet.now = later
    drive_now(made.tick(), fleet)
    assert plan.now.work_s == pytest.approx(4.0)
    assert plan.now.elapsed_s == 1.0


ROLES = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}


def test_each_role_sees_and_changes_its_own_instances_alone() -> None:
    fleet = HandFleet({"p": READY, "q": READY, "d": READY, "e": STANDBY}, roles=ROLES)
    of_prefill, of_decode = HandPlan(1), HandPlan(2)
    prefills, decodes = keeper(of_prefill, spares=()), keeper(of_decode, spares=("e",), decodes=True)
    tick(prefills, fleet)
    record = tick(decodes, fleet)

    assert (of_prefill.now.ready, of_decode.now.ready) == (2, 1)
    assert fleet.states == {"p": DRAINING, "q": READY, "d": READY, "e": STARTING}
    assert (record.role, record.counts, record.starting) == ("decode", "decode", ("e",))
    assert [entry.text.partition(":")[0] for entry in fleet.log] == ["2 -> 1", "decode"]
    of_decode.wanted = 0
    assert decodes.settings.min_instances == 1
    fleet.states["e"] = READY
    tick(decodes, fleet, 3)
    assert fleet.states["q"] is READY
    assert [fleet.states[name] for name in "de"].count(DRAINING) == 1, "not the last one"


def test_the_work_of_decode_instances_is_none_of_those_that_prefill() -> None:
    plan, fleet = HandPlan(), HandFleet({"p": READY, "d": READY}, roles=ROLES)
    made = keeper(plan)
    tick(made, fleet)
    whole = at_once(fleet.now())
    grown = {name: replace(load, window_tokens=4000.0) for name, load in whole.loads.items()}
    fleet.now_ms += 1000

    async def later() -> FleetNow:
        return FleetNow(fleet.now_ms, grown, whole.instances)

    fleet.now = later
    drive_now(made.tick(), fleet)
    assert plan.now.work_s == pytest.approx(4000.0 / grown["p"].prefill_tokens_per_s)


def test_both_roles_are_started_by_the_first_request_and_are_idle_together() -> None:
    fleet = HandFleet({"q": STANDBY, "e": STANDBY}, roles=ROLES)
    settings = AutoscaleSettings(min_instances=0, max_instances=1, start_s=10.0, idle_s=30.0)
    keepers = [
        ScaleKeeper(settings, "w1", 5.0, 128, (spare,), decodes=decodes)
        for spare, decodes in (("q", False), ("e", True))
    ]
    fleet.waiting = fleet.live = 1
    for each in keepers:
        tick(each, fleet)
    assert fleet.states == {"q": STARTING, "e": STARTING}
    fleet.states, fleet.waiting, fleet.live = {"q": READY, "e": READY}, 0, 0
    for _ in range(40):
        for each in keepers:
            tick(each, fleet)
    assert fleet.states == {"q": DRAINING, "e": DRAINING}


def test_a_role_without_instances_is_woken_by_what_the_other_serves() -> None:
    fleet = HandFleet({"q": READY, "e": STANDBY}, roles=ROLES)
    settings = AutoscaleSettings(min_instances=0, max_instances=1, start_s=10.0, idle_s=30.0)
    arrived = iter([0, 0, 3, 3, 3, 3])
    made = ScaleKeeper(settings, "w1", 5.0, 128, ("e",), decodes=True, arrived=lambda: next(arrived))
    tick(made, fleet, 2)
    assert fleet.states["e"] is STANDBY
    assert "served by the other role" in tick(made, fleet).reason
    assert fleet.states["e"] is STARTING


def test_a_pool_without_instances_starts_one_for_what_waits_and_returns_to_none() -> None:
    fleet = HandFleet({"s1": STANDBY})
    settings = AutoscaleSettings(min_instances=0, max_instances=1, start_s=10.0, idle_s=30.0)
    made = ScaleKeeper(settings, "w1", 5.0, 128, ("s1",))
    assert tick(made, fleet, 20).decision_id == 0

    fleet.waiting = 7
    tick(made, fleet)
    assert fleet.states == {"s1": STARTING}
    assert "first instance: 7" in fleet.log[0].text
    fleet.states["s1"], fleet.waiting, fleet.live = READY, 0, 7
    assert tick(made, fleet, 60).status is DecisionStatus.DONE
    assert fleet.states == {"s1": READY}, "requests run"

    fleet.live, fleet.ended = 0, 7
    tick(made, fleet, 29)
    assert fleet.states == {"s1": READY}
    tick(made, fleet, 3)
    assert fleet.states == {"s1": DRAINING}


def test_a_request_that_comes_while_the_last_instance_drains_brings_it_back_at_once() -> None:
    fleet = HandFleet({"s1": READY})
    settings = AutoscaleSettings(min_instances=0, max_instances=1, start_s=10.0, idle_s=30.0)
    made = ScaleKeeper(settings, "w1", 5.0, 128, ("s1",))
    tick(made, fleet, 32)
    assert fleet.states == {"s1": DRAINING}

    fleet.waiting = 1
    assert tick(made, fleet).status is DecisionStatus.WITHDRAWN
    assert fleet.states == {"s1": READY}


def test_a_published_size_of_none_is_published_once() -> None:
    fleet = HandFleet({"a": READY})
    settings = AutoscaleSettings(min_instances=0, max_instances=1, actuator="none", idle_s=30.0)
    made = ScaleKeeper(settings, "w1", 5.0, 128)
    record = tick(made, fleet, 60)
    assert (record.decision_id, record.wanted) == (1, 0)
