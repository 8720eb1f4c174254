"""The size of a pool's decode side: from the room that running requests take, and from the pace of answers."""

from __future__ import annotations

import pytest

from dualmap.scheduling.scaling.decode_plan import DecodePlanner
from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan, ScaleRule


class Watched:
    """Decode instances whose figures a test gives; those that are wanted are ready at once."""

    def __init__(self, ready: int, least: int = 1, most: int = 8) -> None:
        self.planner = DecodePlanner(ScaleRule(least, most, idle_s=60.0))
        self.ready = ready
        self.at_s = 1000.0
        self.steps: list[tuple[float, int, str]] = []

    def passes(self, seconds: int, room: float = 0.0, *, grows: bool = True, **figures: float) -> Plan:
        """``room`` is what running requests take, in instances' worth."""
        for _ in range(seconds):
            self.at_s += 1.0
            given = {"is_used": True, "sequences": room, **figures}
            self.planner.observe(FleetFigures(self.at_s, self.ready, **given))
            plan = self.planner.plan()
            if plan.wanted != self.ready and grows:
                self.steps.append((self.at_s - 1000.0, plan.wanted, plan.reason))
                self.ready = plan.wanted
        return plan


def test_a_load_that_fits_keeps_the_size() -> None:
    fleet = Watched(4)
    fleet.passes(900, 2.8)
    assert fleet.steps == []


def test_more_room_than_there_is_for_some_seconds_is_a_crowd() -> None:
    fleet = Watched(2)
    fleet.passes(60, 1.0)
    fleet.passes(6, 3.2)
    (step,) = fleet.steps
    assert step[1] == 4
    assert step[2].startswith("crowd")


def test_a_burst_of_seconds_and_a_crowd_that_is_served_add_nothing() -> None:
    fleet = Watched(2)
    fleet.passes(60, 1.0)
    fleet.passes(3, 3.2)
    fleet.passes(60, 1.0)
    assert fleet.steps == []


def test_room_that_runs_short_in_the_mean_of_a_while_adds_what_is_missing() -> None:
    fleet = Watched(4)
    fleet.passes(60, 3.0)
    fleet.passes(40, 3.8)
    assert [wanted for _, wanted, _ in fleet.steps] == [5]


def test_a_step_is_no_larger_than_the_bound_says() -> None:
    fleet = Watched(2, most=3)
    assert fleet.passes(60, 9.0).wanted == 3
    assert "at the maximum" in fleet.passes(5, 9.0).reason


def test_slow_answers_of_large_batches_add_instances_one_step_a_minute() -> None:
    fleet = Watched(2)
    fleet.passes(61, 0.5, answer_pace=1.2, running_requests=60)
    assert [wanted for _, wanted, _ in fleet.steps] == [3]
    assert "1.20 of the SLO" in fleet.steps[0][2]
    fleet.passes(50, 0.5, answer_pace=1.2, running_requests=60)
    assert len(fleet.steps) == 1, "the newcomer shows first what it does"


def test_an_engine_that_is_slow_by_itself_is_not_helped_by_more_of_them() -> None:
    fleet = Watched(2)
    fleet.passes(300, 0.5, answer_pace=3.0, running_requests=5)
    assert all(wanted < 2 for _, wanted, _ in fleet.steps)


def test_slack_is_given_back_one_at_a_time_after_minutes() -> None:
    fleet = Watched(4)
    fleet.passes(400, 0.5)
    assert [wanted for _, wanted, _ in fleet.steps] == [3, 2, 1]
    times_s = [at_s for at_s, _, _ in fleet.steps]
    assert times_s[0] >= 180
    assert times_s[1] - times_s[0] >= 30


def test_one_busy_second_within_minutes_keeps_the_size() -> None:
    fleet = Watched(3)
    for _ in range(6):
        fleet.passes(100, 0.5)
        fleet.passes(1, 1.5)
    assert fleet.steps == []


def test_slack_is_kept_where_one_less_would_answer_too_slowly() -> None:
    fleet = Watched(2)
    fleet.passes(600, 0.4, answer_pace=0.6, running_requests=40)
    assert fleet.steps == []
    fleet.passes(600, 0.4, answer_pace=0.4, running_requests=40)
    assert [wanted for _, wanted, _ in fleet.steps] == [1]


def test_newcomers_are_not_sent_away_at_once() -> None:
    fleet = Watched(2)
    fleet.passes(300, 1.4)
    fleet.passes(6, 3.2)
    grown_s = fleet.at_s
    fleet.passes(170, 0.5)
    assert fleet.ready == 4
    fleet.passes(60, 0.5)
    assert fleet.ready < 4
    assert fleet.at_s - grown_s < 240


def test_the_bounds_come_first() -> None:
    assert Watched(1, least=2).passes(1).wanted == 2
    assert Watched(9, most=8).passes(1).wanted == 8


def test_none_while_idle_and_one_for_the_first_request() -> None:
    fleet = Watched(0, least=0)
    assert fleet.passes(20, is_used=False).wanted == 0
    assert fleet.passes(1, waiting_requests=2, grows=False).wanted == 1
    assert fleet.passes(1, arrived_requests=1, grows=False).wanted == 1
    fleet.ready = 1
    assert fleet.passes(70, is_used=True).wanted == 1
    assert fleet.passes(59, is_used=False).wanted == 1
    assert fleet.passes(3, is_used=False).wanted == 0


def test_a_new_leader_and_one_that_looked_away_know_nothing() -> None:
    fleet = Watched(4)
    fleet.passes(170, 0.5)
    fleet.at_s += 60.0
    fleet.passes(100, 0.5)
    assert fleet.steps == []


@pytest.mark.parametrize("room", [0.3, 0.8, 1.5, 2.4, 3.3])
def test_a_constant_load_ends_at_one_size(room: float) -> None:
    fleet = Watched(6)
    fleet.passes(1500, room)
    ended = len(fleet.steps)
    fleet.passes(1500, room)
    assert len(fleet.steps) == ended
    assert room <= 0.85 * fleet.ready
