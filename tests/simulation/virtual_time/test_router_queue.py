from dataclasses import replace

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.router_queue import Pressure, RouterQueue, RouterQueueRule
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.sources import TraceSource

IDLE = Pressure(0, 0, 0.0)
ENGINE = find_preset("qwen2.5-7b-910b4").engine


def test_dynamo_holds_while_every_instance_has_more_prefill_than_the_threshold() -> None:
    queue = RouterQueue(RouterQueueRule.DYNAMO_FCFS, batch_tokens=2048)
    busy = Pressure(16 * 2048 + 1, 0, 0.0)

    assert queue.holds([busy, busy])
    assert not queue.holds([busy, replace(busy, pending_tokens=16 * 2048)])


def test_llm_d_holds_while_the_pool_is_saturated_on_average() -> None:
    queue = RouterQueue(RouterQueueRule.LLM_D_FCFS, batch_tokens=2048)

    assert queue.holds([Pressure(0, 10, 0.0), IDLE]), "one waits for two"
    assert queue.holds([Pressure(0, 0, 0.8)]), "KV memory in use counts as well"
    assert not queue.holds([Pressure(0, 9, 0.0), IDLE])
    assert not queue.holds([]), "without an instance the search says so"


@pytest.mark.parametrize(
    ("rule", "order"),
    [
        (RouterQueueRule.DYNAMO_FCFS, [0, 1, 2]),
        (RouterQueueRule.DYNAMO_WSPT, [2, 0, 1]),
        (RouterQueueRule.LLM_D_FCFS, [0, 1, 2]),
        (RouterQueueRule.LLM_D_DEADLINE, [1, 2, 0]),
    ],
)
def test_each_rule_releases_in_its_own_order(rule: RouterQueueRule, order: list[int]) -> None:
    queue = RouterQueue(rule, batch_tokens=2048)
    for number, (arrival_s, tokens, slo_s) in enumerate(((0.0, 500, 9.0), (1.0, 900, 2.0), (2.0, 100, 2.0))):
        queue.park(number, arrival_s, tokens, slo_s)

    assert [queue.take() for _ in range(3)] == order
    assert not queue


def test_llm_d_releases_the_program_first_that_has_attained_the_least_service() -> None:
    queue = RouterQueue(RouterQueueRule.LLM_D_PROGRAM, batch_tokens=2048)
    queue.ended("long", 9000)
    queue.ended("long", 9000)
    queue.ended("short", 10_000)
    for number, run in enumerate(("long", "short", "new")):
        queue.park(number, float(number), 100, 5.0, run)

    assert [queue.take() for _ in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("rule", RouterQueueRule)
def test_every_parked_request_is_served_and_its_wait_counts(rule: RouterQueueRule) -> None:
    scheduling = SchedulingSettings(policy="dynamo", max_hold_s=3600)
    scenario = Scenario(scheduling, ENGINE, instances=2)
    trace = TraceSource("uniform", 300).load(12.0)

    plain, parked = (Simulation(trace, replace(scenario, router_queue=one)).run() for one in (None, rule))

    assert all(outcome.answered for outcome in parked.outcomes)
    assert [one.arrival_s for one in parked.outcomes] == [request.arrival_s for request in trace.requests]
    waited = [one.dispatched_s - one.arrival_s for one in parked.outcomes if one.dispatched_s is not None]
    assert max(waited) > 1.0, "some wait in the router"
    assert max(one.dispatched_s - one.arrival_s for one in plain.outcomes if one.dispatched_s is not None) == 0.0
