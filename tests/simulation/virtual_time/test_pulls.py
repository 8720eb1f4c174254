"""A fleet whose instances pull contexts from each other."""

from __future__ import annotations

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.virtual_time.scenario import FleetChange, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.generators import contexts, documents

ENGINE = find_preset("qwen2.5-7b-910b4").engine
SCHEDULING = SchedulingSettings(policy="dualmap-least-cost", slo_ttft_s=30.0)
DRAINED_S = 700.0


def drained(*, pulls: bool, kv_events: bool = True) -> tuple[list[RequestOutcome], int]:
    """The turns of eight agents behind the drain of one of three instances, and the tokens that were moved."""
    trace = contexts(requests=300, seed=1, agents=8, least=20_000, most=60_000)
    change = (FleetChange(DRAINED_S, 2),)
    simulation = Simulation(trace, Scenario(SCHEDULING, ENGINE, 3, changes=change, pulls=pulls, kv_events=kv_events))
    outcomes = [each for each in simulation.run().outcomes if each.arrival_s > DRAINED_S]
    return outcomes, simulation._cluster.moved_tokens


def test_contexts_of_an_instance_that_is_drained_are_pulled_instead_of_computed() -> None:
    computed, _ = drained(pulls=False)
    pulled, moved_tokens = drained(pulls=True)

    assert moved_tokens > 0
    assert max(each.input_tokens - each.cached_tokens for each in computed if each.run) > 20_000
    assert max(each.input_tokens - each.cached_tokens for each in pulled if each.run) < 2000


def test_what_a_placement_expects_to_be_pulled_is_found() -> None:
    outcomes, _ = drained(pulls=True)

    assert all(each.cached_tokens == each.expected_cached_tokens for each in outcomes)


def test_nothing_moves_where_nothing_is_pulled() -> None:
    assert drained(pulls=False)[1] == 0


def test_documents_that_all_instances_could_keep_are_answered_as_soon_as_without_pulls() -> None:
    trace = documents(requests=400, seed=1, documents=60, skew=0.0).at_rate(3.0)
    p90 = []
    for pulls in (False, True):
        outcomes = Simulation(trace, Scenario(SCHEDULING, ENGINE, 4, pulls=pulls, kv_events=True)).run().outcomes
        later = sorted(each.ttft_s for each in outcomes[200:])
        p90.append(later[round(0.9 * len(later))])

    assert p90[1] <= 1.01 * p90[0]
