from dataclasses import replace

from scheduling.learning import FirstToken
from scheduling.settings import SchedulingSettings
from scheduling.ttft_model import PRIOR_WEIGHTS
from simulation.generators import conversation, toolagent
from simulation.presets import find_preset
from simulation.scenario import Scenario
from simulation.simulate import Simulation

ENGINE = find_preset("qwen2.5-7b-910b4").engine
CONVERSATION = conversation(requests=200, seed=1).capped(20_480)


def test_what_first_tokens_teach_is_published() -> None:
    simulation = Simulation(CONVERSATION.at_rate(4.0), Scenario(SchedulingSettings(), ENGINE, instances=4))
    prior = ENGINE.instance_spec("x").prefill_tokens_per_s

    simulation.run()

    assert simulation._state.learned.ttft_weights != PRIOR_WEIGHTS
    assert all(book.tokens_per_s != prior for book in simulation._state.instances.values())


def test_requests_that_were_deferred_teach_rates_but_no_ttft() -> None:
    # given an SLO that no request can meet: each is deferred when it is placed on a busy instance
    settings = SchedulingSettings(slo_ttft_s=0.01, max_deferred_s=3600)
    simulation = Simulation(CONVERSATION.at_rate(8.0), Scenario(settings, ENGINE, instances=2))

    simulation.run()

    lessons = [sample.lesson for sample in simulation._state.samples("0", 1000)]
    taught = [lesson for lesson in lessons if isinstance(lesson, FirstToken) and lesson.features is not None]
    assert len(lessons) == 200
    assert 0 < len(taught) < 100, "those that found an idle instance"


def test_wishes_for_a_rebalance_are_met_between_sweeps() -> None:
    trace = toolagent(requests=800, seed=1).capped(20_480).at_rate(13.5)
    scenario = Scenario(SchedulingSettings(policy="dualmap"), ENGINE, rebalance_interval_s=1e9)
    moved = []

    for min_gap_s in (0.02, 1e9):
        simulation = Simulation(trace, replace(scenario, rebalance_min_gap_s=min_gap_s))
        simulation.run()
        moved.append(sum(simulation._state.migrations.values()))

    assert moved[0] > moved[1] + 5, "with so long a gap there is one round alone"
