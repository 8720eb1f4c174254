"""A fleet whose working set is larger than its devices' memory."""

from __future__ import annotations

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.generators import documents

DEVICE = "qwen2.5-7b-910b4-tp1:kv_capacity_tokens=40000"


def run(engine: str) -> RunResult:
    """Questions about 20 documents to two instances that keep 6 of them."""
    trace = documents(requests=300, seed=1, documents=20, skew=0.5).at_rate(1.0)
    scheduling = SchedulingSettings(policy="dualmap-least-cost")
    return simulate(trace, Scenario(scheduling, find_preset(engine).engine, instances=2, skip_requests=100))


def test_host_memory_finds_what_the_devices_have_evicted() -> None:
    without, with_host = run(DEVICE), run(f"{DEVICE}+host_kv_tokens=200000")

    assert without.hit_rate < 0.4
    assert with_host.hit_rate > 0.9
    assert with_host.ttft_s.p50 < without.ttft_s.p50 / 4


def test_where_a_tier_is_too_slow_nothing_is_loaded() -> None:
    never, slow = run(DEVICE), run(f"{DEVICE}+disk_kv_tokens=200000+disk_gb_per_s=0.2")

    assert slow.hit_rate < never.hit_rate + 0.05
    assert slow.ttft_s.p90 < 1.1 * never.ttft_s.p90
