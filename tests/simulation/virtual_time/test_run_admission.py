from dataclasses import replace

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.errors import ScenarioError
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.router_queue import RouterQueueRule
from dualmap.simulation.virtual_time.scenario import EngineFault, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.sources import TraceSource

ADMITS = SchedulingSettings(admit_runs=True)
TRACE = TraceSource("tasks", 1000)


def fleet(kv_capacity_tokens: int, clients: int, seconds: float, instances: int = 1) -> Scenario:
    engine = replace(find_preset("qwen2.5-7b-910b4").engine, kv_capacity_tokens=kv_capacity_tokens)
    loop = Loop(clients, seconds=seconds)
    return Scenario(SchedulingSettings(), engine, instances=instances, loop=loop, skip_s=20.0)


def with_and_without(scenario: Scenario) -> tuple[RunResult, RunResult]:
    admitted = simulate(TRACE.load(), replace(scenario, scheduling=ADMITS))
    return admitted, simulate(TRACE.load(), scenario)


def test_past_the_knee_fewer_runs_at_once_are_more_turns_and_more_hits() -> None:
    admitted, without = with_and_without(fleet(kv_capacity_tokens=200_000, clients=55, seconds=120.0))

    assert admitted.answers_per_s > 1.15 * without.answers_per_s
    assert admitted.hit_rate > without.hit_rate + 0.1
    assert admitted.runs is not None
    assert without.runs is not None
    assert admitted.runs.ended_per_s > 1.3 * without.runs.ended_per_s


def test_with_memory_to_spare_no_decision_changes() -> None:
    admitted, without = with_and_without(fleet(kv_capacity_tokens=1_000_000, clients=15, seconds=60.0))

    assert admitted == without


def test_no_turn_waits_for_ever_also_where_an_engine_dies() -> None:
    fault = EngineFault(30.0, "i001", down_for_s=5.0)
    scenario = replace(fleet(100_000, clients=40, seconds=60.0, instances=2), scheduling=ADMITS, faults=(fault,))

    record = Simulation(TRACE.load(), scenario).run()

    assert all(outcome.outcome is not None for outcome in record.outcomes)
    failed = sum(not outcome.answered for outcome in record.outcomes)
    assert 0 < failed <= 20, "those that had begun their answers on the engine that died"


def test_the_turns_of_sub_agents_are_of_their_run() -> None:
    trace = TraceSource("agents", 600).load()
    scenario = replace(fleet(kv_capacity_tokens=300_000, clients=8, seconds=60.0), scheduling=ADMITS)

    record = Simulation(trace, scenario).run()

    assert len(record.turns_of_runs) < len({request.session for request in trace.requests})
    assert all(outcome.outcome is not None for outcome in record.outcomes)
    assert {outcome.run for outcome in record.outcomes} <= record.turns_of_runs.keys()


def test_one_of_two_queues_before_the_placement() -> None:
    scenario = fleet(100_000, clients=10, seconds=10.0)
    with pytest.raises(ScenarioError, match="one of the two"):
        replace(scenario, scheduling=ADMITS, router_queue=RouterQueueRule.DYNAMO_FCFS)
