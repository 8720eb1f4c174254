"""The search for the smallest fleet, and one search with a simulated fleet."""

from __future__ import annotations

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.fleet_size import MOST_INSTANCES, FleetSizeJob, fewest_instances, run_fleet_size
from dualmap.simulation.presets import find_preset
from dualmap.simulation.runs import RunJob
from dualmap.simulation.scenario import Scenario
from dualmap.simulation.sources import TraceSource


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
