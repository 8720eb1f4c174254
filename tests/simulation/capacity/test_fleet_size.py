"""The search for the smallest fleet, and one search with a simulated fleet."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.fleet_size import (
    MOST_INSTANCES,
    FleetSizeJob,
    fewest_instances,
    p99_limit_s,
    run_fleet_size,
)
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.first_tokens import p99_of_all_s
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.workload.sources import TraceSource


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 64, 777, MOST_INSTANCES])
@pytest.mark.parametrize("start", [1, 5, 100, 5000])
def test_the_smallest_number_is_found_from_any_start(needed: int, start: int) -> None:
    tried: list[int] = []

    def share_with(instances: int) -> float:
        tried.append(instances)
        return min(1.0, 0.9 * instances / needed)

    assert fewest_instances(share_with, 0.9, start) == needed
    assert len(tried) == len(set(tried)) <= 21, "nothing is tried twice, and not many are"


def test_a_share_that_more_instances_do_not_raise_ends_the_search() -> None:
    tried: list[int] = []

    def share_with(instances: int) -> float:
        tried.append(instances)
        return min(0.89, 0.2 * instances)

    assert fewest_instances(share_with, 0.9, 3) == 0
    assert tried == [3, 6, 12]


def test_a_fleet_of_the_found_size_is_on_time_and_one_less_is_not() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    job = RunJob(TraceSource("uniform", 300), Scenario(SchedulingSettings(), engine, skip_requests=50), 6.0)

    size = run_fleet_size(FleetSizeJob("qwen2.5-7b-910b4", 1, job, 0.95))

    assert size.result.instances == size.instances > 1
    assert size.result.share_on_time >= 0.95
    assert size.share_with_one_less is not None and size.share_with_one_less < 0.95


def test_an_slo_per_token_asks_for_more_instances() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    scenarios = [
        Scenario(SchedulingSettings(), engine, skip_requests=20, slo_tpot_s=slo_tpot_s) for slo_tpot_s in (None, 0.06)
    ]

    plain, both = (
        run_fleet_size(FleetSizeJob("7b", 1, RunJob(TraceSource("uniform", 150), scenario, 6.0), 0.9))
        for scenario in scenarios
    )

    assert both.instances > plain.instances


def test_a_plan_on_time_whose_last_requests_wait_long_is_not_taken() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    job = RunJob(TraceSource("toolagent", 200), Scenario(SchedulingSettings(), engine, skip_requests=25), 20.0)

    unbounded, bounded = (run_fleet_size(FleetSizeJob("7b", 1, job, 0.5, p99_s)) for p99_s in (1e9, None))

    assert unbounded.result.ttft_s.p99 > bounded.p99_limit_s, "half of them on time says nothing of the rest"
    assert bounded.instances > unbounded.instances
    assert p99_of_all_s(bounded.result) <= bounded.p99_limit_s


def test_a_bound_that_no_fleet_keeps_is_named() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    job = RunJob(TraceSource("uniform", 100), Scenario(SchedulingSettings(), engine), 4.0)

    size = run_fleet_size(FleetSizeJob("7b", 1, job, 0.5, 0.001))

    assert size.instances == 0
    assert size.why_not == "P99 of the first token above 0.0 s"


def test_prompts_longer_than_the_slo_allows_get_a_bound_that_a_fleet_can_keep() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    trace = TraceSource("toolagent", 200).load()

    assert p99_limit_s(trace, engine, 100.0) == 300.0
    assert p99_limit_s(trace, engine, 0.001) > 0.1


def test_more_requests_without_an_answer_than_one_of_a_hundred_have_no_p99() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    result = RunJob(TraceSource("uniform", 100), Scenario(SchedulingSettings(), engine), 4.0).run()

    assert p99_of_all_s(replace(result, refused=1)) == result.ttft_s.p99
    assert p99_of_all_s(replace(result, refused=2)) == inf


def test_a_search_says_how_far_each_run_is() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    job = RunJob(TraceSource("uniform", 100), Scenario(SchedulingSettings(), engine), 6.0)
    arrived: dict[int, int] = {}
    tried: list[int] = []

    size = run_fleet_size(
        FleetSizeJob("7b", 1, job, 0.9), arrived.__setitem__, lambda result: tried.append(result.instances)
    )

    assert len(tried) == size.runs
    assert set(arrived) == set(tried)
    assert all(0 < count <= 100 for count in arrived.values())
