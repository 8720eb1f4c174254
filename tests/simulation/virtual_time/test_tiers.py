"""A fleet whose working set is larger than its devices' memory."""

from __future__ import annotations

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import EngineFault, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
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


def test_a_pool_has_what_an_instance_computed_that_died() -> None:
    # given 20 documents that fit on two devices, of which one dies
    trace = documents(requests=300, seed=1, documents=20, skew=0.5).at_rate(0.5)
    scheduling, dies = SchedulingSettings(policy="dualmap-least-cost"), (EngineFault(300.0, "i001", 1e6),)
    device = "qwen2.5-7b-910b4-tp1:kv_capacity_tokens=400000"
    engines = [find_preset(name).engine for name in (device, f"{device}+pool_kv_tokens=800000")]
    scenarios = [Scenario(scheduling, engine, instances=2, faults=dies) for engine in engines]
    alone, pooled = (
        [each for each in Simulation(trace, one).run().outcomes if each.arrival_s > 300] for one in scenarios
    )
    # then the other one loads from the pool what it would compute again
    computed, loaded = ([each.input_tokens - each.cached_tokens for each in outcomes] for outcomes in (alone, pooled))
    assert max(computed) > 12_000
    assert max(loaded) < 1024
