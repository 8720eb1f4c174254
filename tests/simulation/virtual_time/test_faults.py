"""Engines that die in virtual time: retries, breakers and legs by the code that serves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import EngineFault, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.generators import conversation

ENGINE = find_preset("qwen2.5-7b-910b4").engine
TRACE = conversation(requests=300, seed=1).capped(20_480).at_rate(3.0)
DIES = EngineFault(at_s=40.0, instance_id="i002", down_for_s=20.0)


def run(trace: object = TRACE, **changes: object) -> Simulation:
    scenario = Scenario(SchedulingSettings(), ENGINE, instances=4)
    simulation = Simulation(trace, replace(scenario, **changes))
    simulation.run()
    return simulation


def nothing_is_left(simulation: Simulation) -> bool:
    snapshot = at_once(simulation.replicas[0].pool.store.snapshot())
    counts = [(load.pending_tokens, load.context_tokens, load.queued_requests) for load in snapshot.loads.values()]
    return not snapshot.requests and not simulation.replicas[0].requests.live and set(counts) == {(0, 0, 0)}


def test_what_a_dying_engine_had_not_answered_is_answered_by_another_one() -> None:
    simulation = run(faults=(DIES,))
    outcomes = simulation._outcomes

    retried = [one for one in outcomes if one.tries > 1]
    assert retried
    assert all(one.outcome is Outcome.COMPLETED and one.finish_s is not None for one in retried)
    cut = [one for one in outcomes if one.outcome is Outcome.UPSTREAM_FAILED]
    assert cut, "those whose clients had a part of the answer"
    assert all(one.first_token_s is not None and one.first_token_s <= DIES.at_s for one in cut)
    assert len(cut) + sum(one.answered for one in outcomes) == len(outcomes)
    assert nothing_is_left(simulation)


def test_a_dead_engine_is_avoided_after_its_first_failures_and_serves_again_when_it_is_back() -> None:
    simulation = run(faults=(DIES,))
    by_phase = {"dead": 0, "back": 0}
    for one in simulation._outcomes:
        if one.instance_id == DIES.instance_id and one.dispatched_s is not None:
            if DIES.at_s + 2.0 < one.dispatched_s < DIES.at_s + DIES.down_for_s:
                by_phase["dead"] += 1
            elif one.dispatched_s > DIES.at_s + DIES.down_for_s:
                by_phase["back"] += 1

    assert by_phase["back"] > 10
    assert by_phase["dead"] == 0


def test_with_no_instance_left_every_request_is_refused_within_its_tries() -> None:
    faults = tuple(EngineFault(10.0, f"i{number:03d}", 1e6) for number in range(1, 5))
    simulation = run(faults=faults)

    late = [one for one in simulation._outcomes if one.arrival_s > 10.0]
    assert {one.outcome for one in late} <= {Outcome.UPSTREAM_FAILED, Outcome.REFUSED}
    assert max(one.tries for one in late) <= 3
    assert nothing_is_left(simulation)


@pytest.mark.parametrize("dies", ["i001", "i004"])
def test_the_legs_of_split_requests_are_placed_again_when_a_prefiller_or_a_decoder_dies(dies: str) -> None:
    scheduling = SchedulingSettings(split=SplitSettings(mode="always"))
    simulation = run(scheduling=scheduling, roles="2P2D", faults=(EngineFault(40.0, dies, 20.0),))

    outcomes = simulation._outcomes
    assert any(one.tries > 1 or simulation.replicas[0].requests.retries for one in outcomes)
    assert {one.outcome for one in outcomes} <= {Outcome.COMPLETED, Outcome.UPSTREAM_FAILED}
    assert sum(one.outcome is Outcome.COMPLETED for one in outcomes) > 0.9 * len(outcomes)
    assert nothing_is_left(simulation)
    assert not simulation._staged


def test_a_request_that_is_held_for_too_long_is_turned_away_in_virtual_time_too() -> None:
    scheduling = SchedulingSettings(max_hold_s=5.0)
    simulation = run(trace=TRACE.at_rate(30.0), scheduling=scheduling)

    timed_out = [one for one in simulation._outcomes if one.outcome is Outcome.TIMED_OUT]
    assert timed_out
    assert nothing_is_left(simulation)
