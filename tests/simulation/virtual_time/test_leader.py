import random
from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.learning import FirstTokenSample
from dualmap.scheduling.estimates.ttft_model import PRIOR_WEIGHTS
from dualmap.scheduling.settings import PolicyName, SchedulingSettings
from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.generators import conversation, toolagent
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE = find_preset("qwen2.5-7b-910b4").engine
CONVERSATION = conversation(requests=200, seed=1).capped(20_480)


def test_what_first_tokens_teach_is_published() -> None:
    simulation = Simulation(CONVERSATION.at_rate(4.0), Scenario(SchedulingSettings(), ENGINE, instances=4))
    prior = ENGINE.instance_spec("x").prefill_tokens_per_s

    simulation.run()

    assert simulation.replicas[0].pool.members.learned.ttft_weights != PRIOR_WEIGHTS
    assert all(load.prefill_tokens_per_s != prior for load in simulation.replicas[0].pool.loads().values())


def test_requests_that_were_deferred_teach_rates_but_no_ttft() -> None:
    # given an SLO that no request can meet: each is deferred when it is placed on a busy instance
    settings = SchedulingSettings(slo_ttft_s=0.01, max_deferred_s=3600)
    simulation = Simulation(CONVERSATION.at_rate(8.0), Scenario(settings, ENGINE, instances=2))

    simulation.run()

    samples = [sample.content for sample in at_once(simulation.replicas[0].pool.store.publications.samples("0", 1000))]
    contents = [content for content in samples if isinstance(content, FirstTokenSample)]
    taught = [content for content in contents if content.features is not None]
    assert len(contents) == 200
    assert 0 < len(taught) < 100, "those that found an idle instance"


def test_wishes_for_a_rebalance_are_met_between_sweeps() -> None:
    trace = toolagent(requests=800, seed=1).capped(20_480).at_rate(13.5)
    scenario = Scenario(SchedulingSettings(policy="dualmap"), ENGINE, rebalance_interval_s=1e9)
    moved = []

    for min_gap_s in (0.02, 1e9):
        simulation = Simulation(trace, replace(scenario, rebalance_min_gap_s=min_gap_s))
        simulation.run()
        moved.append(sum(at_once(simulation.replicas[0].pool.store.overview()).migrations.values()))

    assert moved[0] > moved[1] + 5, "with so long a gap there is one round alone"


def short_then_long(most_tokens: int, long_tokens: int = 16_000) -> Trace:
    """A minute of short prompts, ten seconds of silence, and three long ones; nothing is shared."""
    rng, block_tokens = random.Random(1), 512
    short = sorted((rng.uniform(0.0, 60.0), rng.randint(20, most_tokens)) for _ in range(720))
    arrivals = [*short, *((80.0 + 8 * number, long_tokens) for number in range(3))]
    requests = [
        TraceRequest(at_s, tokens, 30, tuple(range(100 * number, 100 * number + -(-tokens // block_tokens))))
        for number, (at_s, tokens) in enumerate(arrivals)
    ]
    return Trace("short then long", block_tokens, tuple(requests))


@pytest.mark.parametrize("most_tokens", [80, 400])
@pytest.mark.parametrize("policy", ["dualmap", "dualmap-least-cost"])
def test_short_prompts_do_not_spoil_the_estimate_of_long_ones(policy: PolicyName, most_tokens: int) -> None:
    scenario = Scenario(SchedulingSettings(policy=policy), ENGINE, instances=2, late_requests="refuse")
    simulation = Simulation(short_then_long(most_tokens), scenario)

    outcomes = simulation.run().outcomes

    prior = ENGINE.instance_spec("x").prefill_tokens_per_s
    rates = [load.prefill_tokens_per_s for load in simulation.replicas[0].pool.loads().values()]
    assert rates == [pytest.approx(prior, rel=0.2)] * 2
    for one in outcomes[-3:]:
        assert one.expected_ttft_s == pytest.approx(one.ttft_s, rel=0.25)


@pytest.mark.parametrize("policy", ["dualmap", "dualmap-least-cost", "least-loaded"])
def test_idle_instances_refuse_nothing_because_of_a_wrong_rate_and_learn_the_right_one(policy: PolicyName) -> None:
    # given instances that were last believed to be ten times slower than they are
    trace = short_then_long(80)
    trace = replace(trace, requests=trace.requests[-3:])
    simulation = Simulation(trace, Scenario(SchedulingSettings(policy=policy), ENGINE, 1, late_requests="refuse"))
    simulation._resize(1)
    pool = simulation.replicas[0].pool
    slower = {name: load.prefill_tokens_per_s / 10 for name, load in pool.loads().items()}
    at_once(simulation.replicas[0].leader.led.publish_learned(pool.members.learned, slower))

    outcomes = simulation.run().outcomes

    assert [one.on_time for one in outcomes] == [True] * 3
    assert outcomes[0].expected_ttft_s > 10
    assert outcomes[-1].expected_ttft_s == pytest.approx(outcomes[-1].ttft_s, rel=0.3)
