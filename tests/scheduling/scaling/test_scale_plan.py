"""The scale plan on figures made up here: up fast, down slowly, and no flapping."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import exp, sqrt
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dualmap.scheduling.scaling.scale_plan import (
    DOWN_GAP_S,
    LONGEST_GAP_S,
    SETTLED_S,
    SLACK_S,
    WARM_S,
    FleetFigures,
    ScalePlanner,
    ScaleRule,
    staffing,
)
from dualmap.scheduling.scaling.scale_settings import MARGIN

REQUEST_S = 0.5
"""Prefill work of one request."""
SLO_S, REFUSED_S = 5.0, 30.0
"""Work that waits longer is late, and goes after so long."""


class Fleet:
    """A fleet whose size follows the plan at once, or after ``start_s``; each instance computes what it is counted."""

    def __init__(self, size: int, least: int = 1, most: int = 20, start_s: int = 0, margin: float = MARGIN) -> None:
        self.planner = ScalePlanner(ScaleRule(least, most, margin))
        self.size, self.start_s, self.now_s = size, start_s, 0
        self.ready_s: list[int] = []
        self.waiting_s = 0.0
        self.changes: list[tuple[int, int, int, str]] = []

    def second(self, load: float, requests: int | None = None, **more: float) -> None:
        """One look, after a second in which work for ``load`` instances arrived."""
        self.now_s += 1
        self.ready_s = [at_s for at_s in self.ready_s if at_s > self.now_s]
        starting = len(self.ready_s)
        ready = self.size - starting
        arrived = round(load / REQUEST_S) if requests is None else requests
        self.waiting_s = min(max(0.0, self.waiting_s + load - ready), (SLO_S + REFUSED_S) * ready)
        if (late_s := self.waiting_s - SLO_S * ready) > 0:
            more = {"late_s": late_s, "late_instances": ready, **more}
        figures = FleetFigures(self.now_s, ready, starting, 1.0, load, arrived_requests=arrived, **more)
        self.planner.observe(figures)
        plan = self.planner.plan()
        if plan.wanted != self.size:
            self.changes.append((self.now_s, self.size, plan.wanted, plan.reason))
            self.ready_s += [self.now_s + self.start_s] * max(0, plan.wanted - self.size)
            self.size = plan.wanted

    def run(self, seconds: int, load: Callable[[int], float], **more: float) -> None:
        for _ in range(seconds):
            self.second(load(self.now_s), **more)

    @property
    def turns(self) -> int:
        """How often the direction of change changed."""
        ups = [after > before for _, before, after, _ in self.changes]
        return sum(one != other for one, other in itertools.pairwise(ups))


def noisy(rng: Random, load: float) -> float:
    """Work of a second: requests of 0.5 s, their number with the variance of a Poisson process."""
    requests = load / REQUEST_S
    return max(0.0, REQUEST_S * round(rng.gauss(requests, sqrt(requests))))


def test_a_doubled_load_is_answered_within_fifteen_seconds_with_the_size_that_carries_it() -> None:
    fleet = Fleet(4)
    fleet.run(300, lambda _: 3.0)
    assert fleet.changes == []

    fleet.run(15, lambda _: 6.0)

    assert fleet.changes
    assert fleet.size in (7, 8)
    assert "crowd" in fleet.changes[0][3]


def test_longer_prompts_take_one_instance_after_another_though_no_more_requests_come() -> None:
    fleet = Fleet(4, start_s=30)
    fleet.run(300, lambda _: 2.5)
    for _ in range(900):
        fleet.second(6.0, requests=5)

    assert [(before, after) for _, before, after, _ in fleet.changes] == [(4, 5), (5, 7)]
    assert fleet.changes[0][0] - 300 <= 90
    assert all(reason.startswith("overload") for _, _, _, reason in fleet.changes)


def test_an_overload_takes_more_instances_for_what_is_late() -> None:
    fleet = Fleet(4, start_s=30)
    fleet.run(300, lambda _: 2.5)
    for _ in range(60):
        fleet.second(5.0, requests=5, late_s=130.0, late_instances=4)
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(4, 5)]
    for _ in range(200):
        fleet.second(6.0, requests=5, late_s=190.0, late_instances=5)
    assert [(before, after) for _, before, after, _ in fleet.changes][:2] == [(4, 5), (5, 7)]
    assert "s are late" in fleet.changes[1][3]


def test_what_was_late_before_a_newcomer_was_ready_is_no_reason_for_the_next() -> None:
    fleet = Fleet(4, start_s=30)
    fleet.run(300, lambda _: 2.5)
    for _ in range(60):
        fleet.second(5.0, requests=5, late_s=90.0, late_instances=4)
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(4, 5)]
    for _ in range(70):
        fleet.second(5.0, requests=5, late_s=60.0, late_instances=5)
    for _ in range(300):
        fleet.second(4.0, requests=5)
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(4, 5)]


def test_work_that_drifts_up_for_minutes_and_back_changes_nothing_while_it_is_on_time() -> None:
    fleet = Fleet(4, start_s=30)
    fleet.run(1200, lambda _: 3.1)
    for _ in range(50):
        fleet.second(4.5, requests=6)
    for _ in range(150):
        fleet.second(3.6, requests=6)
    fleet.run(1800, lambda _: 3.1)
    assert fleet.changes == []


def test_prompts_that_no_size_would_serve_on_time_are_no_reason() -> None:
    fleet = Fleet(4)
    fleet.run(900, lambda _: 2.5, late_s=80.0, late_instances=4)
    assert fleet.changes == []


def test_a_burst_that_the_queue_digests_is_no_reason() -> None:
    fleet = Fleet(4)
    fleet.run(300, lambda _: 2.5)
    fleet.run(120, lambda now_s: 15.0 if now_s % 40 == 0 else 2.2)
    assert fleet.changes == []


def test_as_many_long_requests_as_chance_brings_are_no_crowd() -> None:
    fleet = Fleet(5)
    for _ in range(300):
        fleet.second(4.2, requests=4)
    for _ in range(20):
        fleet.second(6.3, requests=6)
    for _ in range(30):
        fleet.second(3.2, requests=3)
    assert fleet.changes == [], "twenty more than 1.25 times the usual, of 1 s each"


def test_a_size_that_ten_minutes_of_work_show_to_be_too_small_takes_one_more() -> None:
    fleet = Fleet(5, start_s=30)
    fleet.run(5400, lambda _: 4.7)
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(5, 6)]
    at_s, _, _, reason = fleet.changes[0]
    assert abs(at_s - WARM_S - SETTLED_S) <= 2
    assert reason == "level: work for 4.7 instances in the last 10 minutes, 5 serve"


def test_one_more_is_enough_as_the_same_requests_are_less_work_to_more_instances() -> None:
    planner = ScalePlanner(ScaleRule(1, 20))
    wanted = [8]
    for at_s in range(1, 800):
        planner.observe(FleetFigures(at_s, 8, wanted[-1] - 8, 1.0, 8.65, arrived_requests=16))
        if (plan := planner.plan()).wanted != wanted[-1]:
            wanted.append(plan.wanted)
    assert staffing(8.65, planner.rule.margin) == 10
    assert wanted == [8, 9]


@pytest.mark.parametrize(("margin", "size"), [(-0.5, 3), (MARGIN, 4), (0.5, 5)])
def test_slack_leaves_as_many_instances_as_the_margin_says(margin: float, size: int) -> None:
    fleet = Fleet(8, margin=margin)
    fleet.run(3600, lambda _: 2.2)
    assert fleet.size == size


def test_a_size_that_was_large_enough_for_ten_minutes_is_not_judged_again_by_its_work() -> None:
    fleet = Fleet(5)
    fleet.run(1200, lambda _: 4.5)
    fleet.run(2400, lambda _: 4.8)
    assert fleet.changes == []


def test_late_work_of_one_instance_alone_is_no_reason() -> None:
    fleet = Fleet(4)
    fleet.run(300, lambda _: 2.5, late_s=40.0, late_instances=1)
    assert fleet.changes == []


@pytest.mark.parametrize("figure", ["kv_demand", "sequences"])
def test_running_requests_that_take_the_instances_room_are_a_reason_of_their_own(figure: str) -> None:
    fleet = Fleet(4)
    fleet.run(60, lambda _: 1.0, **{figure: 3.6})
    assert fleet.changes[0][2] == 5
    assert "room of 3.6" in fleet.changes[0][3]


@pytest.mark.parametrize("figure", ["kv_demand", "sequences"])
def test_nothing_leaves_whose_room_running_requests_need(figure: str) -> None:
    fleet = Fleet(8)
    fleet.run(900, lambda _: 1.6, **{figure: 2.8})
    assert fleet.changes == []


def test_slack_takes_one_instance_at_a_time_and_takes_its_time() -> None:
    fleet = Fleet(8)
    fleet.run(900, lambda _: 1.6)

    times = [at_s for at_s, _, _, _ in fleet.changes]
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(8, 7), (7, 6), (6, 5), (5, 4), (4, 3)]
    assert times[0] >= SLACK_S
    assert all(later - at_s >= DOWN_GAP_S for at_s, later in itertools.pairwise(times))


def test_what_a_crowd_was_given_is_given_back_soon_after_it_is_over_and_no_more() -> None:
    fleet = Fleet(4)
    fleet.run(400, lambda _: 3.0)
    fleet.run(300, lambda _: 6.0)
    assert fleet.size >= 7
    fleet.changes = []

    fleet.run(240, lambda _: 2.6)

    assert fleet.size == 4
    assert all("the crowd is over" in reason for _, _, _, reason in fleet.changes)
    assert fleet.changes[-1][0] - 700 < SLACK_S, "slack would begin later"


def test_a_crowd_that_did_not_last_is_no_reason_to_hurry() -> None:
    fleet = Fleet(4)
    fleet.run(400, lambda _: 3.0)
    fleet.run(16, lambda _: 6.5)
    assert fleet.size > 4
    grown_s = fleet.changes[-1][0]
    fleet.changes = []

    fleet.run(600, lambda _: 2.6)

    assert fleet.changes[0][0] - grown_s >= SLACK_S
    assert "slack" in fleet.changes[0][3]


def test_the_first_minutes_tell_no_level_to_leave_by() -> None:
    fleet = Fleet(4)
    fleet.run(int(WARM_S + SLACK_S) - 1, lambda _: 1.2)
    assert fleet.changes == []


def test_a_load_that_rises_slowly_takes_one_instance_after_another() -> None:
    fleet = Fleet(4)
    for _ in range(3600):
        load = 3.0 + fleet.now_s / 900
        fleet.second(load, requests=round(2 * load))
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(4, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize("load", [0.8, 1.6, 3.0, 4.4, 7.5])
def test_a_constant_load_changes_nothing_where_the_size_is_right(load: float) -> None:
    rng, fleet = Random(7), Fleet(staffing(load, 0.4))

    fleet.run(3600, lambda _: noisy(rng, load))

    assert fleet.changes == []


def test_nothing_leaves_while_work_is_late_or_instances_start() -> None:
    late = Fleet(8)
    late.run(600, lambda _: 2.0, late_s=3.0, late_instances=1)
    assert late.changes == []
    starting = Fleet(8)
    for _ in range(600):
        starting.now_s += 1
        starting.planner.observe(FleetFigures(starting.now_s, 7, 1, 1.0, 2.0))
        assert starting.planner.plan().wanted == 8


@pytest.mark.parametrize(("size", "wanted"), [(1, 3), (9, 6)])
def test_the_bounds_hold_from_the_first_look(size: int, wanted: int) -> None:
    planner = ScalePlanner(ScaleRule(3, 6))
    planner.observe(FleetFigures(1, size))
    assert planner.plan().wanted == wanted


def test_at_the_maximum_the_plan_says_so_and_wants_no_more() -> None:
    fleet = Fleet(4, most=4)
    fleet.run(60, lambda _: 9.0)
    assert fleet.changes == []
    assert "at the maximum" in fleet.planner.plan().reason


def test_after_a_gap_what_was_seen_before_counts_for_nothing() -> None:
    fleet = Fleet(4)
    fleet.run(9, lambda _: 12.0)
    fleet.size, fleet.changes = 4, []
    fleet.now_s += int(LONGEST_GAP_S) + 1
    fleet.run(3, lambda _: 2.0)
    assert fleet.changes == []


@pytest.mark.parametrize("load", [0.1, 1.0, 3.3, 7.9, 30.0])
def test_a_larger_load_never_needs_fewer_instances_and_each_has_room(load: float) -> None:
    assert staffing(load, 0.4) > load
    assert staffing(1.1 * load, 0.4) >= staffing(load, 0.4)


@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 10_000),
    load=st.floats(0.2, 12.0),
    size=st.integers(1, 16),
    start_s=st.sampled_from([0, 10, 60]),
)
def test_a_constant_load_never_causes_more_than_one_change_back(
    seed: int, load: float, size: int, start_s: int
) -> None:
    rng, fleet = Random(seed), Fleet(size, start_s=start_s)

    fleet.run(3600, lambda _: noisy(rng, load))

    assert fleet.turns <= 1, fleet.changes


def busy_second(rng: Random, fleet: Fleet, requests_per_s: float, longer: float) -> None:
    """Requests whose work has a heavy tail, and is more on a fleet that is nearly full; ``longer``: this minute's."""
    requests = max(0, round(rng.gauss(requests_per_s, sqrt(requests_per_s))))
    used = requests_per_s * REQUEST_S / max(1, fleet.size - len(fleet.ready_s))
    each_s = REQUEST_S * (1 + longer) * (1 + 0.8 * max(0.0, used - 0.65))
    tail = max(0.0, rng.gauss(1.0, 1 / sqrt(max(1, requests))))
    fleet.second(requests * each_s * tail, requests)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("requests_per_s", [3.0, 5.5, 8.2])
def test_prompts_whose_lengths_drift_are_a_constant_load_and_change_nothing_after_the_first_minutes(
    seed: int, requests_per_s: float
) -> None:
    rng, fleet, longer, kept = Random(seed), Fleet(12, start_s=30), 0.0, exp(-1 / 120)

    for _ in range(5400):
        longer = kept * longer + sqrt(1 - kept**2) * rng.gauss(0, 0.07)
        busy_second(rng, fleet, requests_per_s, longer)

    assert [change for change in fleet.changes if change[0] > 900] == []
    assert fleet.turns <= 1


@pytest.fixture
def grown() -> Fleet:
    """Five instances, since four were too small for six requests a second: there they are more work."""
    fleet = Fleet(4)
    for _ in range(7200):
        fleet.second(4.2 if fleet.size <= 4 else 2.6, requests=6)
    assert [(before, after) for _, before, after, _ in fleet.changes] == [(4, 5)], "once, and no change back"
    return fleet


def test_a_size_that_was_too_small_is_tried_again_when_fewer_requests_come(grown: Fleet) -> None:
    for _ in range(600):
        grown.second(2.2, requests=5)
    assert grown.size == 4


def test_a_size_that_was_too_small_is_tried_again_when_the_requests_are_lighter(grown: Fleet) -> None:
    for _ in range(600):
        grown.second(2.0, requests=6)
    assert grown.size < 5


# from zero -------------------------------------------------------------------------------------------------------
IDLE_S = 300


def test_a_pool_without_requests_returns_to_none_and_the_first_request_brings_one_instance() -> None:
    fleet = Fleet(2, least=0)
    fleet.run(60, lambda _: 0.5)
    fleet.run(IDLE_S - 1, lambda _: 0.0)
    assert fleet.size > 0
    fleet.run(2, lambda _: 0.0)
    assert fleet.size == 0
    assert "no request for" in fleet.changes[-1][3]

    fleet.run(3600, lambda _: 0.0)
    assert fleet.size == 0, "time alone starts nothing"
    fleet.second(0.0, waiting_requests=200)
    assert fleet.size == 1
    assert "first instance: 200" in fleet.changes[-1][3]


def test_an_instance_that_was_started_stays_for_the_idle_time_though_its_request_has_gone() -> None:
    fleet = Fleet(0, least=0, start_s=60)
    fleet.second(0.0, waiting_requests=1)
    fleet.run(58 + IDLE_S, lambda _: 0.0)
    assert fleet.size == 1
    fleet.run(3, lambda _: 0.0)
    assert fleet.size == 0


@pytest.mark.parametrize("sign", [{"is_used": True}, {"running_requests": 1}])
def test_requests_that_bring_no_work_or_last_long_keep_the_last_instance(sign: dict[str, float]) -> None:
    fleet = Fleet(1, least=0)
    fleet.run(3 * IDLE_S, lambda _: 0.0, **sign)
    assert fleet.size == 1


def test_a_pool_with_a_minimum_of_one_keeps_it() -> None:
    fleet = Fleet(1, least=1)
    fleet.run(3 * IDLE_S, lambda _: 0.0)
    assert fleet.changes == []


def test_the_next_leader_waits_for_the_idle_time_itself() -> None:
    fleet = Fleet(1, least=0)
    fleet.run(IDLE_S - 10, lambda _: 0.0)
    fleet.planner = ScalePlanner(fleet.planner.rule)
    fleet.run(IDLE_S - 10, lambda _: 0.0)
    assert fleet.size == 1
