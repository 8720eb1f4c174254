"""Runs over fleets with prefill and decode instances."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import POLICIES, PolicyName, SchedulingSettings, SplitSettings
from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Dispatch, EngineFault, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
from dualmap.simulation.workload.generators import toolagent
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE: EngineConfig = find_preset("qwen2.5-7b-910b4").engine
TRACE = toolagent(requests=150, seed=1).capped(20_480)


def scenario(policy: PolicyName = "dualmap-least-cost", *, roles: str = "2P2D", mode: str = "always") -> Scenario:
    split = SplitSettings.model_validate({"mode": mode})
    scheduling = SchedulingSettings(policy=policy, max_deferred_s=3600, max_hold_s=3600, split=split)
    return Scenario(scheduling, ENGINE, instances=4, roles=roles)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_split_request_is_answered_once_and_leaves_nothing_behind(policy: PolicyName) -> None:
    simulation = Simulation(TRACE.at_rate(3.0), scenario(policy))

    record = simulation.run()

    for outcome in record.outcomes:
        assert outcome.first_token_s is not None
        assert outcome.finish_s is not None
        assert outcome.arrival_s < outcome.first_token_s <= outcome.finish_s
        assert (outcome.instance_id in ("i001", "i002"), outcome.decode_id in ("i003", "i004")) == (True, True)
    left = at_once(simulation.replicas[0].pool.store.snapshot())
    assert left.requests == ()
    for load in left.loads.values():
        assert (load.pending_tokens, load.dispatched_tokens, load.context_tokens) == (0, 0, 0)
    assert_engines_are_empty(simulation)
    assert record.leaks == 0


def test_a_split_request_takes_its_prefill_its_transfer_and_its_decoding() -> None:
    # given a prompt of one block and an answer of three tokens, alone on two instances
    engine = replace(ENGINE, transfer=KvTransfer(bytes_per_token=1000, bytes_per_s=1e6, latency_s=0.1))
    trace = Trace("alone", 512, (TraceRequest(1.0, 512, 3, (7,)),))
    made = replace(scenario(roles="1P1D"), engine=engine, instances=2)
    (outcome,) = Simulation(trace, made).run().outcomes
    # then its first token comes after prefill, 0.1 s and 0.512 s of transfer, and the step of its last prompt token
    costs = engine.costs
    prefill_s = costs.prefill_s(512, 2048)
    step_s = costs.step_s(1, 512, 0, 0, 1)
    assert outcome.ttft_s == pytest.approx(prefill_s + 0.612 + step_s)
    # and the two others a decode step each
    assert outcome.finish_s is not None
    steps_s = costs.step_s(0, 0, 1, 513) + costs.step_s(0, 0, 1, 514)
    assert outcome.finish_s - 1.0 - outcome.ttft_s == pytest.approx(steps_s)


def test_where_decode_legs_go_first_the_transfer_overlaps_the_prefill_and_each_request_is_answered_once() -> None:
    # given a link over which the KV of a prompt takes about as long as its prefill
    engine = replace(ENGINE, transfer=KvTransfer(bytes_per_token=57_344, bytes_per_s=0.5e9, latency_s=0.005))
    prefill_first, decode_first = (
        Simulation(TRACE.at_rate(3.0), replace(scenario(), engine=engine, decode_first=first))
        for first in (False, True)
    )

    after, during = prefill_first.run(), decode_first.run()

    for outcome in during.outcomes:
        assert outcome.outcome is Outcome.COMPLETED
        assert outcome.first_token_s is not None
        assert (outcome.instance_id in ("i001", "i002"), outcome.decode_id in ("i003", "i004")) == (True, True)
    ttft_s = [statistics.fmean(each.ttft_s or math.inf for each in run.outcomes) for run in (after, during)]
    assert ttft_s[1] < ttft_s[0]
    assert at_once(decode_first.replicas[0].pool.store.snapshot()).requests == ()
    assert_engines_are_empty(decode_first)


@pytest.mark.parametrize("dies", ["i001", "i004"])
def test_where_decode_legs_go_first_the_other_leg_of_one_whose_engine_dies_is_aborted(dies: str) -> None:
    made = replace(scenario(), decode_first=True, faults=(EngineFault(40.0, dies, 20.0),))
    simulation = Simulation(TRACE.at_rate(6.0), made)

    record = simulation.run()

    assert any(outcome.tries > 1 for outcome in record.outcomes)
    assert {outcome.outcome for outcome in record.outcomes} <= {Outcome.COMPLETED, Outcome.UPSTREAM_FAILED}
    assert at_once(simulation.replicas[0].pool.store.snapshot()).requests == ()
    assert_engines_are_empty(simulation)
    assert set(simulation.replicas[0].waiting.values()) == {0}


def assert_engines_are_empty(simulation: Simulation) -> None:
    for engine in simulation._cluster.engines.values():
        seen = engine.statistics()
        assert (seen.used_blocks, seen.staged, seen.waiting, seen.running) == (0, 0, 0, 0)


def test_the_ways_to_serve_are_as_the_settings_say() -> None:
    always, never, auto = (simulate(TRACE.at_rate(3.0), scenario(mode=mode)) for mode in ("always", "never", "auto"))

    assert (always.split_share, never.split_share, never.moved_tokens) == (1.0, 0.0, 0)
    assert {"i003", "i004"} == never.by_instance.keys(), "whole requests stay where they can be decoded"
    assert 0 < auto.split_share < 1
    assert 0 < auto.moved_tokens < always.moved_tokens


def test_a_fleet_of_mixed_instances_splits_nothing() -> None:
    assert simulate(TRACE.at_rate(3.0), scenario(roles="4M")).split_share == 0.0


def test_requests_sent_at_once_are_split_too() -> None:
    result = simulate(TRACE.at_rate(3.0), replace(scenario("llm-d"), dispatch=Dispatch.DIRECT))

    assert (result.split_share, result.refused) == (1.0, 0)


def test_a_request_too_long_for_the_decode_instance_is_refused_and_its_kv_released() -> None:
    # given an engine whose limit the prompt and its answer exceed, the prompt and one token do not
    engine = replace(ENGINE, max_model_len=600)
    trace = Trace("long", 512, (TraceRequest(1.0, 512, 200, (7,)),))
    simulation = Simulation(trace, replace(scenario(roles="1P1D"), engine=engine, instances=2))

    record = simulation.run()

    assert [outcome.answered for outcome in record.outcomes] == [False]
    assert record.leaks == 0
    assert at_once(simulation.replicas[0].pool.store.snapshot()).requests == ()
    assert all(engine.statistics().used_blocks == 0 for engine in simulation._cluster.engines.values())


def test_kv_that_times_out_is_computed_again_and_counted_as_a_leak() -> None:
    # given staged KV that is kept for 50 ms, and a transfer that takes 100 ms at least
    engine = replace(ENGINE, transfer=KvTransfer(latency_s=0.1), staged_timeout_s=0.05)
    trace = Trace("alone", 512, (TraceRequest(1.0, 512, 3, (7,)),))
    record = Simulation(trace, replace(scenario(roles="1P1D"), engine=engine, instances=2)).run()

    assert record.leaks == 1
    assert [outcome.answered for outcome in record.outcomes] == [True]


def test_the_same_run_gives_the_same_result_to_the_last_digit() -> None:
    first, second = (simulate(TRACE.at_rate(3.0), scenario(mode="auto")) for _ in range(2))

    assert first == second


def roles_moved(roles: str, *, move: bool = True) -> tuple[list[str], float]:
    """The roles that instances were given, one after the other, and the share of answers that kept 50 ms a token."""
    trace = toolagent(requests=1500, seed=1).capped(20_480).at_rate(8.0)
    split = SplitSettings(mode="always")
    simulation = Simulation(
        trace, Scenario(SchedulingSettings(split=split), ENGINE, instances=8, roles=roles, move_roles=move)
    )
    record = simulation.run()
    kept = [
        (each.finish_s - each.first_token_s) / max(1, each.output_tokens - 1) <= 0.05
        for each in record.outcomes
        if each.finish_s is not None and each.first_token_s is not None
    ]
    return [change.role.value for _, change in record.role_changes], sum(kept) / len(record.outcomes)


def test_a_decode_side_that_is_too_small_grows_until_its_answers_are_fast_enough() -> None:
    changed, kept = roles_moved("6P2D")

    assert set(changed) == {"decode"}, "never there and back"
    assert kept > roles_moved("6P2D", move=False)[1] + 0.2


def test_a_fleet_whose_roles_fit_its_traffic_keeps_them() -> None:
    assert roles_moved("4P4D")[0] == []
