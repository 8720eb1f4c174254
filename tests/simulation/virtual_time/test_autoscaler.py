"""The autoscaler in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import fmean

from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import Role
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.generators import GeneratorSpec
from dualmap.simulation.workload.traces import Trace, TraceRequest

PRESET = find_preset("qwen2.5-7b-910b4").engine


@cache  # some tests look at the same run, which is the same every time
def run(trace: str, requests: int, instances: int, least: int, most: int, start_s: float = 10.0) -> RunResult:
    spec = GeneratorSpec.parse(trace)
    assert spec is not None
    settings = AutoscaleSettings(min_instances=least, max_instances=most, start_s=start_s)
    scenario = Scenario(SchedulingSettings(), PRESET, instances=instances, autoscale=Autoscale(settings))
    return simulate(spec.generate(requests).capped(20_480), scenario)


def test_a_flash_crowd_is_answered_with_more_instances_and_they_leave_again() -> None:
    result = run("flashcrowd:factor=4,span_s=1200", 3200, 2, 2, 8)
    assert result.changes
    first = result.changes[0]
    assert 400 <= first.at_s <= 420, "within twenty seconds of its begin"
    assert first.wanted >= 4
    assert any(change.wanted < change.size and change.at_s > 800 for change in result.changes)
    assert result.effective_capacity > 0.98
    assert result.refused <= 0.001 * result.requests


def test_instance_hours_count_those_that_are_ready_start_or_still_answer() -> None:
    steady = run("flashcrowd:factor=1,span_s=600", 600, 2, 2, 2)
    assert steady.changes == ()
    assert abs(steady.instance_hours - 2 * 600 / 3600) < 0.01


def test_slack_drains_one_at_a_time_and_nothing_is_cut_off() -> None:
    result = run("flashcrowd:factor=1,span_s=600", 900, 5, 1, 5)
    assert len(result.changes) >= 2
    assert all(change.wanted == change.size - 1 for change in result.changes)
    assert result.refused == 0


def test_a_bound_of_both_sides_keeps_the_size() -> None:
    crowded = run("flashcrowd:factor=3,span_s=300", 750, 2, 2, 2)
    assert crowded.changes == ()
    assert replace(crowded).instances == 2


def test_what_is_held_moves_to_newcomers() -> None:
    result = run("flashcrowd:factor=5,span_s=600", 2000, 2, 2, 8, start_s=5.0)
    assert result.migrations > 0


def test_newcomers_serve_at_once_and_their_cold_caches_make_nobody_late() -> None:
    result = run("flashcrowd:factor=4,span_s=1200", 3200, 2, 2, 8)
    ready_s = result.changes[0].at_s + 10.0
    shares = [(at_s, share) for at_s, share, _ in result.timeline]
    before = [share for at_s, share in shares if ready_s - 30 <= at_s < ready_s]
    after = [share for at_s, share in shares if ready_s <= at_s < ready_s + 60]
    assert min(after) >= min(before) - 0.02
    joined = [result.by_instance[name][0] for name in sorted(result.by_instance)[2:4]]
    began_s = joined[0][0]
    sent = [requests for points in result.by_instance.values() for at_s, requests, _ in points if at_s == began_s]
    # Ready for two thirds of that half minute, each has at least half of what an equal share of it would be.
    assert all(requests >= fmean(sent) / 3 for _, requests, _ in joined)


def test_one_hot_prefix_is_no_reason_to_grow() -> None:
    spec = GeneratorSpec.parse("hotspot")
    assert spec is not None
    autoscale = Autoscale(AutoscaleSettings(min_instances=4, max_instances=8, start_s=10.0))
    scenario = Scenario(SchedulingSettings(), PRESET, instances=4, autoscale=autoscale)
    result = simulate(spec.generate(3000).at_rate(8.0).capped(20_480), scenario)
    assert result.changes == ()
    assert result.effective_capacity > 0.97


def test_from_zero_requests_wait_for_the_first_instance_and_an_idle_pool_returns_to_none() -> None:
    requests = [TraceRequest(at_s, 500, 20, (number,)) for number, at_s in enumerate((5.0, 5.5, 6.0, 700.0))]
    settings = AutoscaleSettings(min_instances=0, max_instances=1, start_s=20.0, idle_s=100.0)
    scenario = Scenario(SchedulingSettings(), PRESET, instances=0, autoscale=Autoscale(settings))
    result = simulate(Trace("few", 512, tuple(requests)), scenario)

    assert result.refused == 0
    assert [(change.size, change.wanted) for change in result.changes] == [(0, 1), (1, 0), (0, 1)]
    assert 105 <= result.changes[1].at_s <= 135
    assert result.ttft_s.p50 > 15.0


def test_prefill_and_decode_instances_scale_by_their_own_loads() -> None:
    decode = {"min_instances": 1, "max_instances": 4}
    settings = AutoscaleSettings(min_instances=1, max_instances=3, start_s=10.0, decode=decode)
    roles = (*(Role.PREFILL, Role.DECODE), *(Role.PREFILL,) * 2, *(Role.DECODE,) * 3)
    engine = replace(PRESET, kv_capacity_tokens=60_000)
    fleet = tuple(replace(engine.instance_spec(f"i{number}"), role=role) for number, role in enumerate(roles))
    # Short prompts and long answers: what runs fills the memory of decoders, and prefill instances have little to do.
    requests = tuple(TraceRequest(number * 0.5, 1000, 1500, (2 * number, 2 * number + 1)) for number in range(300))
    split = SplitSettings(mode="always")
    scenario = Scenario(
        SchedulingSettings(split=split), engine, instances=2, fleet=fleet, autoscale=Autoscale(settings)
    )
    result = simulate(Trace("answers", 512, requests), scenario)

    assert result.refused == 0
    assert [change for change in result.changes if change.role != "decode"] == []
    grown = [change.wanted for change in result.changes if change.wanted > change.size]
    assert grown
    assert max(grown) >= 3
    assert result.split_share > 0.9


class StartsNothing:
    """A plan by which the size stays."""

    def __init__(self) -> None:
        self._size = 0

    def observe(self, now: FleetFigures) -> None:
        self._size = now.size

    def plan(self) -> Plan:
        return Plan(self._size, "as it is")


def test_what_waits_in_vain_is_refused() -> None:
    requests = (TraceRequest(5.0, 500, 20, (1,)),)
    settings = AutoscaleSettings(min_instances=0, max_instances=1, start_s=20.0)
    autoscale = Autoscale(settings, lambda _: StartsNothing())
    scenario = Scenario(SchedulingSettings(), PRESET, instances=0, autoscale=autoscale)
    result = simulate(Trace("one", 512, requests), scenario)
    assert result.refused == 1
