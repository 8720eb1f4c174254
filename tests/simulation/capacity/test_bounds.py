"""The bound against hand-made cases, and against every policy in the simulator."""

from dataclasses import replace

import pytest

from dualmap.scheduling.settings import PolicyName, SchedulingSettings
from dualmap.simulation.capacity.bounds import bounds_of, ideal_requests, longest_step_s, sustainable_rate
from dualmap.simulation.capacity.goodput import find_goodput
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.engine.step_time import StepCosts
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE = find_preset("qwen2.5-7b-910b4").engine
PLAIN = EngineConfig(
    StepCosts(overhead_s=0.0, weights_s=0.0, token_s=0.001, attention_pair_s=0.0, sequence_s=0.0, context_token_s=0.0),
    block_tokens=100,
)
"""A thousand tokens a second, whatever they are."""


def trace(*requests: TraceRequest) -> Trace:
    return Trace("made", 100, requests)


def unique(number: int, tokens: int, output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(
        float(number), tokens, output_tokens, tuple(range(1000 * number, 1000 * number + tokens // 100))
    )


def test_ten_equal_requests_fill_the_span_and_the_slo() -> None:
    # Given 10 requests of one second each on one instance: 9 of them need 9 s, 5 s of it behind the last arrival.
    made = trace(*(unique(number, 1000) for number in range(10)))

    bound_per_s = bounds_of(made, PLAIN, 1, slo_s=5.0).ideal_goodput_per_s

    assert bound_per_s == pytest.approx(10 / 4, rel=1e-6), "so the arrivals can be squeezed into 4 s"
    assert sustainable_rate(made, PLAIN, 1) == pytest.approx(10 / 9)


def test_the_costliest_are_left_out() -> None:
    made = trace(*(unique(number, 100_000 if number == 4 else 1000) for number in range(10)))

    assert bounds_of(made, PLAIN, 1, slo_s=5.0).ideal_goodput_per_s == pytest.approx(10 / 4, rel=1e-6)
    assert bounds_of(made, PLAIN, 1, slo_s=5.0, share=1.0).ideal_goodput_per_s < 0.2


def test_a_prefix_is_computed_once() -> None:
    made = trace(*(TraceRequest(float(number), 1000, 1, tuple(range(10))) for number in range(3)))

    works = [one.prefill_s for one in ideal_requests(made, PLAIN)]

    assert works == pytest.approx([1.0, 0.001, 0.001]), "the last token is always computed"


def test_more_instances_carry_more() -> None:
    made = trace(*(unique(number, 1000) for number in range(100)))

    rates = [bounds_of(made, PLAIN, instances, slo_s=5.0).ideal_goodput_per_s for instances in (1, 2, 4)]

    assert rates == sorted(rates)
    assert bounds_of(made, PLAIN, 100, slo_s=5.0).ideal_goodput_per_s == float("inf"), "all fit into one SLO"


def test_decoding_counts_as_far_as_no_scheduler_can_put_it_off() -> None:
    short = trace(*(unique(number, 1000) for number in range(60)))
    long = trace(*(unique(number, 1000, output_tokens=500) for number in range(60)))

    bounds = bounds_of(long, PLAIN, 1, slo_s=5.0)
    assert bounds.ideal_goodput_per_s < bounds_of(short, PLAIN, 1, slo_s=5.0).ideal_goodput_per_s
    assert bounds.sustainable_per_s < bounds.ideal_goodput_per_s


def test_no_step_of_a_run_is_longer_than_the_longest() -> None:
    made = TraceSource("conversation", 100, 20_480).load()

    longest_s = longest_step_s(made, ENGINE)

    assert longest_s > ENGINE.costs.step_s(2048, 2048 * 20_480, 256, 900_000)
    assert longest_s < 1.0


@pytest.mark.parametrize("source", ["uniform", "hotspot", "coding"])
@pytest.mark.parametrize("policy", ["dualmap-least-cost", "llm-d", "preble"])
def test_no_simulated_run_exceeds_the_bound(policy: PolicyName, source: str) -> None:
    made = TraceSource(source, 160, 20_480).load()
    # Two instances with fleeting answers: prefill decides, so the bound is as tight as it gets.
    made = replace(made, requests=tuple(replace(request, output_tokens=2) for request in made.requests))
    order = "deadline" if policy == "dualmap-least-cost" else "fifo"
    scenario = Scenario(SchedulingSettings(policy=policy, queue_order=order), ENGINE, instances=2)
    bound_per_s = bounds_of(made, ENGINE, 2, slo_s=5.0).ideal_goodput_per_s

    found = find_goodput(
        lambda rate: simulate(made.at_rate(rate), scenario).effective_capacity, bound_per_s, tolerance=0.1
    )

    assert 0.25 * bound_per_s < found.rate_per_s < bound_per_s


def test_twice_the_instances_sustain_twice_the_rate_and_fewer_requests_more() -> None:
    made = TraceSource("uniform", 300).load()

    assert sustainable_rate(made, ENGINE, 4) == pytest.approx(2 * sustainable_rate(made, ENGINE, 2))
    assert sustainable_rate(made, ENGINE, 4) > sustainable_rate(made, ENGINE, 4, share=1.0)
