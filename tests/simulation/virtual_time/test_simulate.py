from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest

from dualmap.scheduling.estimates.answer_length import expected_answer_tokens
from dualmap.scheduling.request.eviction import MOST_EVICTIONS
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import POLICIES, PolicyName, PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.steps import at_once
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RequestOutcome, RunResult
from dualmap.simulation.virtual_time.scenario import Dispatch, FleetChange, Scenario, SpeedChange
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.generators import conversation, hotspot, tasks, toolagent
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE: EngineConfig = find_preset("qwen2.5-7b-910b4").engine
CONVERSATION = conversation(requests=400, seed=1).capped(20_480)
FEW = replace(CONVERSATION, requests=CONVERSATION.requests[:160])
ALL_ARE_SERVED = {
    policy: SchedulingSettings(policy=policy, max_deferred_s=3600, max_hold_s=3600) for policy in POLICIES
}


def scenario(policy: PolicyName = "dualmap", **changes: object) -> Scenario:
    return replace(Scenario(SchedulingSettings(policy=policy), ENGINE, instances=4), **changes)


def figures(result: RunResult) -> dict[str, object]:
    return asdict(result)


@pytest.mark.parametrize("policy", ["dualmap-least-cost", "dualmap", "llm-d"])
@pytest.mark.parametrize("tokens", [100, 1700])
def test_a_burst_at_once_is_all_served_and_about_as_soon_as_from_an_engines_own_queue(
    policy: PolicyName, tokens: int
) -> None:
    # given as many requests on one instance as would be late by far
    blocks = -(-tokens // 512)
    ids = [tuple(range(first, first + blocks)) for first in range(0, 400 * blocks, blocks)]
    burst = Trace("burst", 512, tuple(TraceRequest(0.0, tokens, 16, each) for each in ids))

    def run(dispatch: Dispatch | None) -> RunResult:
        settings = SchedulingSettings(policy=policy)
        return simulate(burst, Scenario(settings, ENGINE, instances=1, dispatch=dispatch))

    held, direct = run(None), run(Dispatch.DIRECT)

    assert (held.refused, direct.refused) == (0, 0)
    assert held.ttft_s.p99 <= 1.15 * direct.ttft_s.p99


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_nothing_is_left_behind(policy: PolicyName) -> None:
    simulation = Simulation(FEW.at_rate(4.0), scenario(policy, scheduling=ALL_ARE_SERVED[policy]))

    record = simulation.run()

    assert len(record.outcomes) == 160
    for outcome in record.outcomes:
        assert outcome.first_token_s is not None
        assert outcome.finish_s is not None
        assert outcome.arrival_s < outcome.first_token_s <= outcome.finish_s
        assert 0 <= outcome.cached_tokens < outcome.input_tokens
    left = at_once(simulation.replicas[0].pool.store.snapshot())
    assert left.requests == ()
    for load in left.loads.values():
        assert (load.pending_tokens, load.dispatched_tokens, load.context_tokens) == (0, 0, 0)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_first_tokens_that_are_not_seen_are_presumed_and_nothing_is_left_behind(share: float) -> None:
    trace = FEW.at_rate(2.0)
    simulation = Simulation(trace, scenario(first_tokens_seen=share, scheduling=ALL_ARE_SERVED["dualmap"]))

    record = simulation.run()

    outcomes = [outcome.outcome for outcome in record.outcomes]
    assert outcomes.count(Outcome.COMPLETED) == share * 160
    assert outcomes.count(Outcome.ENDED) == (1 - share) * 160
    left = at_once(simulation.replicas[0].pool.store.snapshot())
    assert left.requests == ()
    assert {load.pending_tokens for load in left.loads.values()} == {0}


@pytest.mark.parametrize("policy", ["dualmap", "llm-d"])
def test_the_same_run_gives_the_same_result_to_the_last_digit(policy: PolicyName) -> None:
    trace = FEW.at_rate(5.0)

    assert figures(simulate(trace, scenario(policy))) == figures(simulate(trace, scenario(policy)))


@pytest.mark.parametrize("known", [False, True])
def test_the_lengths_of_answers_are_learned_whether_or_not_requests_have_a_limit(known: bool) -> None:
    short = Trace(
        "short",
        CONVERSATION.block_tokens,
        tuple(replace(request, output_tokens=5) for request in CONVERSATION.requests),
    )
    simulation = Simulation(short.at_rate(2.0), scenario(output_limits_known=known))

    simulation.run()

    learned = simulation.replicas[0].fleet.learned
    expected = expected_answer_tokens(learned.answer_tokens, 5 if known else None)
    assert 5 <= expected < 20  # of the prior of 256 tokens about nothing is left after 400 answers


def test_requests_far_apart_are_undisturbed_and_many_of_a_busy_fleet_are_not() -> None:
    apart, busy = (simulate(TraceSource("uniform", 200).load(rate), scenario()) for rate in (0.05, 4.0))

    assert apart.undisturbed_share > 0.9
    assert 0 < busy.undisturbed_share < apart.undisturbed_share
    assert busy.undisturbed_error_p50 != busy.ttft_error_p50


def test_no_engine_hits_more_than_an_endless_shared_cache_would() -> None:
    result = simulate(CONVERSATION.at_rate(3.0), scenario())

    assert 0 < result.hit_rate <= result.infinite_hit_rate


def test_one_lonely_request_takes_the_engines_own_prefill_time() -> None:
    trace = Trace("one", 512, (TraceRequest(1.0, 4096, 10, tuple(range(8))),))

    result = simulate(trace, scenario())

    expected_s = ENGINE.costs.prefill_s(4096, ENGINE.max_num_batched_tokens)
    assert result.ttft_s.p50 == pytest.approx(expected_s)
    assert result.tpot_s.mean < 0.1
    assert result.effective_capacity == 1.0


def test_a_request_repeated_after_its_answer_hits_and_is_sent_where_its_blocks_are() -> None:
    first = TraceRequest(0.0, 4096, 10, tuple(range(8)))
    trace = Trace("two", 512, (first, replace(first, arrival_s=60.0)))

    record = Simulation(trace, scenario()).run()

    assert record.outcomes[1].instance_id == record.outcomes[0].instance_id
    assert record.outcomes[1].cached_tokens == 7 * 512  # the last block is computed again: its last token must be
    assert record.outcomes[1].ttft_s < record.outcomes[0].ttft_s


def test_more_instances_never_serve_fewer_on_time() -> None:
    trace = CONVERSATION.at_rate(4.0)

    shares = [simulate(trace, scenario(instances=n)).effective_capacity for n in (2, 4, 8)]

    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[2] > 0.85


def test_a_request_is_judged_and_queued_by_the_slo_that_its_trace_gives_it() -> None:
    # given two prompts for one instance that arrive together, the later of which is in a hurry
    first, second = (TraceRequest(0.0, 8000, 5, tuple(range(n, n + 16))) for n in (0, 100))
    busy = TraceRequest(0.0, 20_000, 5, tuple(range(200, 240)))
    trace = Trace("made", 512, (busy, first, replace(second, slo_ttft_s=5.0)))
    one = scenario("dualmap-least-cost", instances=1, scheduling=SchedulingSettings(slo_ttft_s=30.0))

    outcomes = Simulation(trace, one).run().outcomes

    assert [outcome.slo_s for outcome in outcomes] == [30.0, 30.0, 5.0]
    assert outcomes[2].first_token_s < outcomes[1].first_token_s
    assert all(outcome.on_time for outcome in outcomes)


def test_time_held_in_the_fleet_counts_as_waiting() -> None:
    trace = CONVERSATION.at_rate(8.0)

    held, direct = (simulate(trace, scenario(dispatch=mode)) for mode in (Dispatch.HOLD, Dispatch.DIRECT))

    assert max(sample.held_requests for sample in held.samples) > 0
    assert all(sample.held_requests == 0 for sample in direct.samples)
    assert held.ttft_s.p90 > 5.0
    assert direct.ttft_s.p90 > 5.0


def test_what_may_move_or_be_reordered_is_held_and_all_else_is_sent_at_once() -> None:
    assert scenario("dualmap-least-loaded").dispatch_of is Dispatch.HOLD
    by_deadline = scenario(scheduling=SchedulingSettings(policy="preble", queue_order="deadline"))
    assert by_deadline.dispatch_of is Dispatch.HOLD
    assert scenario("preble").dispatch_of is Dispatch.DIRECT
    assert scenario("preble", dispatch=Dispatch.HOLD).dispatch_of is Dispatch.HOLD


def test_only_dualmap_migrates() -> None:
    trace = toolagent(requests=400, seed=1).capped(20_480).at_rate(14.0)

    assert simulate(trace, scenario("dualmap", instances=8)).migrations > 0
    assert simulate(trace, scenario("dualmap-no-rebalance", instances=8)).migrations == 0


def test_hot_prefixes_get_longer_keys() -> None:
    result = simulate(toolagent(requests=1500, seed=1).capped(20_480).at_rate(24.0), scenario(instances=16))

    share = {blocks: count / result.requests for blocks, count in result.key_blocks.items()}
    assert share[13] > 0.3, "the tool prompt of 12 blocks"
    assert share[6] > 0.1, "the tool prompt of 5 blocks, 15 % of requests: hot from 14 instances on"
    assert share[2] > 0.4, "all others share only their first block"


def test_a_moving_hot_spot_keeps_being_found() -> None:
    trace = hotspot(requests=2000, seed=1)
    outcomes = Simulation(trace, scenario(instances=8)).run().outcomes

    for begin in (300, 1300):
        keys = [outcome.key_blocks for outcome in outcomes[begin : begin + 500]]
        assert sum(blocks == 7 for blocks in keys) > 100, "six hot blocks and one more"


def test_instances_that_join_take_load_and_those_that_leave_finish_theirs() -> None:
    trace = CONVERSATION.at_rate(4.0)
    changes = (FleetChange(30.0, 6), FleetChange(60.0, 3))

    record = Simulation(trace, scenario(changes=changes)).run()

    by_time = {begin: set() for begin in (0, 30, 60)}  # type: dict[int, set[str]]
    for outcome in record.outcomes:
        by_time[min(60, int(outcome.arrival_s // 30) * 30)].add(outcome.instance_id)
    assert by_time[0] <= {"i001", "i002", "i003", "i004"}
    assert {"i005", "i006"} <= by_time[30]
    assert by_time[60] <= {"i001", "i002", "i003"}
    assert all(outcome.finish_s is not None for outcome in record.outcomes)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_late_requests_are_refused_where_the_operator_wants_it(seed: int) -> None:
    overload = conversation(requests=600, seed=seed).capped(20_480).at_rate(8.0)

    serving = simulate(overload, scenario(scheduling=ALL_ARE_SERVED["dualmap-least-cost"]))
    refusing = simulate(overload, scenario("dualmap-least-cost", late_requests="refuse"))

    assert serving.refused == 0 < refusing.refused
    assert refusing.ttft_s.p90 < 6 < serving.ttft_s.p90, "those that are let in need not wait for the others"
    assert refusing.effective_capacity >= serving.effective_capacity - 0.02


def test_a_request_that_no_engine_can_serve_is_refused_and_counted() -> None:
    small = replace(ENGINE, max_model_len=4096)

    result = simulate(CONVERSATION.at_rate(2.0), scenario(engine=small))

    too_long = sum(r.input_tokens + r.output_tokens > 4096 for r in CONVERSATION.requests)
    assert result.refused == too_long
    assert result.effective_capacity <= 1 - too_long / 400


def test_full_queues_refuse() -> None:
    result = simulate(CONVERSATION.at_rate(20.0), scenario(max_queued_requests=2))

    assert result.refused > 0
    assert result.requests == 400


@pytest.mark.parametrize("policy", ["dualmap", "dualmap-least-cost"])
def test_nobody_is_refused_while_another_instance_has_a_place(policy: PolicyName) -> None:
    # given more of one prompt at once than its pair has places for, and an empty fleet
    alike = [TraceRequest(0.01 * number, 20_480, 8, tuple(range(40))) for number in range(12)]

    record = Simulation(Trace("alike", 512, tuple(alike)), scenario(policy, max_queued_requests=2)).run()

    assert all(outcome.finish_s is not None for outcome in record.outcomes)
    assert len({outcome.instance_id for outcome in record.outcomes}) == 4


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lasting_overload_holds_a_bounded_backlog_and_takes_nothing_from_requests_on_time(seed: int) -> None:
    # given four instances at one and a half times what they can carry, for five times as long as a request may be held
    overload = conversation(requests=2400, seed=seed).capped(20_480).at_rate(8.0)
    found = {}
    for name, max_deferred_s in (("bounded", 6.0), ("unbounded", 1e6)):
        settings = SchedulingSettings(policy="dualmap-least-cost", max_hold_s=60.0, max_deferred_s=max_deferred_s)
        found[name] = simulate(overload, scenario(scheduling=settings, skip_requests=1200))
    held = {name: max(sample.held_requests for sample in result.samples) for name, result in found.items()}

    assert held["bounded"] < held["unbounded"] / 3
    assert found["bounded"].effective_capacity > found["unbounded"].effective_capacity - 0.02
    assert found["bounded"].effective_capacity > 0.6
    assert max(result.longest_hold_s for result in found.values()) <= 61.0


def test_the_first_requests_load_the_fleet_but_stay_out_of_the_figures() -> None:
    trace = FEW.at_rate(4.0)

    result = simulate(trace, scenario(skip_requests=100))

    assert result.requests == 60
    assert sum(result.key_blocks.values()) == 60


def test_progress_is_told(tmp_path: Path) -> None:
    heard: list[int] = []

    simulate(TraceSource("uniform", requests=300).load(), scenario(), heard.append)

    assert heard == [100, 200, 300]


@pytest.mark.parametrize("queue_order", ["fifo", "deadline"])
def test_a_request_held_too_long_is_refused(queue_order: Literal["fifo", "deadline"]) -> None:
    settings = SchedulingSettings(
        policy="dualmap-least-cost", queue_order=queue_order, max_hold_s=15.0, max_deferred_s=3600
    )

    result = simulate(CONVERSATION.at_rate(12.0), scenario(scheduling=settings, dispatch=Dispatch.HOLD))

    assert result.refused > 0
    assert 5.0 < result.longest_hold_s <= 16.01, "the sweep comes once a second"


def test_by_deadline_far_more_requests_are_on_time_under_overload() -> None:
    def on_time(queue_order: Literal["fifo", "deadline"]) -> float:
        settings = SchedulingSettings(policy="dualmap-least-cost", queue_order=queue_order)
        overload = scenario(scheduling=settings, dispatch=Dispatch.HOLD, dispatch_window_tokens=4096)
        return simulate(CONVERSATION.at_rate(12.0), overload).effective_capacity

    assert on_time("deadline") > on_time("fifo") + 0.3


def test_long_prompts_have_the_slo_of_their_length() -> None:
    by_length = SchedulingSettings(slo_ttft_s=1.0, slo_ttft_s_per_1k_tokens=0.5, slo_ttft_max_s=4.0)
    run = Simulation(FEW.at_rate(2.0), replace(scenario(), scheduling=by_length)).run()

    targets = {outcome.input_tokens: outcome.slo_s for outcome in run.outcomes}
    assert targets == {tokens: min(1.0 + 0.5 * tokens / 1000, 4.0) for tokens in targets}


def test_idle_instances_take_what_waits_where_it_would_be_late() -> None:
    """Four more instances join two that are overloaded."""

    def run(*, idle_work: bool) -> tuple[float, int]:
        joined = scenario("dualmap-least-cost", instances=2, changes=(FleetChange(60.0, 6),), idle_work=idle_work)
        record = Simulation(CONVERSATION.at_rate(4.0), joined).run()
        waiting = [one for one in record.outcomes if 55 <= one.arrival_s < 60]
        return sum(one.on_time for one in waiting) / len(waiting), record.migrations

    (without, none), (with_idle_work, moved) = run(idle_work=False), run(idle_work=True)
    assert with_idle_work > without
    assert (none, moved > 0) == (0, True)


def test_an_instance_that_slows_down_takes_so_much_longer() -> None:
    trace = Trace("two", 512, (TraceRequest(1.0, 4096, 10, tuple(range(8))), TraceRequest(100.0, 4096, 10, (90, 91))))
    slow = scenario("round-robin", instances=1, speed_changes=(SpeedChange(50.0, "i001", 3.0),))

    first, second = Simulation(trace, slow).run().outcomes

    assert second.ttft_s == pytest.approx(3 * first.ttft_s)


def test_every_instance_has_the_figures_of_its_own() -> None:
    """One that may hold nothing is given a request only when it has room; KV memory is each engine's own."""
    fleet = (
        InstanceSpec("narrow", "http://a", dispatch_window_tokens=1, max_queued_requests=0, kv_capacity_tokens=51_200),
        InstanceSpec("wide", "http://b", max_queued_requests=1000),
    )
    simulation = Simulation(
        CONVERSATION.at_rate(8.0), scenario("round-robin", dispatch=Dispatch.HOLD, instances=2, fleet=fleet)
    )

    record = simulation.run()

    assert {one.chosen_id for one in record.outcomes} == {"narrow", "wide"}
    assert max(one.held_s for one in record.outcomes if one.chosen_id == "narrow") == 0
    assert max(one.held_s for one in record.outcomes if one.chosen_id == "wide") > 1
    blocks = {name: engine.statistics().total_blocks for name, engine in simulation._cluster.engines.items()}
    assert blocks == {"narrow": 100, "wide": 1_000_000 // 512}


def test_migrations_and_preemptions_of_the_warm_up_and_of_the_drain_are_not_counted() -> None:
    trace = CONVERSATION.at_rate(1.0)
    engine = replace(ENGINE, kv_capacity_tokens=60_000)

    every, most, last = (
        simulate(trace, scenario(engine=engine, skip_requests=skip)) for skip in (0, 100, len(trace.requests) - 1)
    )

    assert every.migrations > most.migrations
    assert every.preemptions > most.preemptions > 0
    assert (last.migrations, last.preemptions) == (0, 0)


SESSIONS = tasks(requests=400, seed=1)
CLOSED = {"by think times": Loop(), "by clients": Loop(concurrency=24)}


@pytest.mark.parametrize("loop", CLOSED.values(), ids=CLOSED)
@pytest.mark.parametrize("policy", ["dualmap-least-cost", "llm-d"])
def test_turns_wait_for_the_answers_before_them(policy: PolicyName, loop: Loop) -> None:
    record = Simulation(SESSIONS, scenario(policy, loop=loop)).run()

    assert len(record.outcomes) == 400
    assert [one.arrival_s for one in record.outcomes] == sorted(one.arrival_s for one in record.outcomes)
    by_lengths = {(one.input_tokens, one.output_tokens): one for one in record.outcomes}
    assert len(by_lengths) == 400  # so that lengths tell requests apart
    latest: dict[str, RequestOutcome] = {}
    for request in SESSIONS.requests:
        outcome = by_lengths[request.input_tokens, request.output_tokens]
        before = latest.get(request.session)
        if before is not None and request.think_s is not None:
            assert before.finish_s is not None
            assert outcome.arrival_s == pytest.approx(before.finish_s + request.think_s)
        latest[request.session] = outcome


def test_no_more_than_the_clients_are_ever_under_way() -> None:
    record = Simulation(CONVERSATION, scenario(loop=Loop(concurrency=5))).run()

    for outcome in record.outcomes:
        others = [one for one in record.outcomes if one.arrival_s <= outcome.arrival_s < (one.finish_s or 0.0)]
        assert len(others) <= 5
    result = simulate(CONVERSATION, scenario(loop=Loop(concurrency=5), skip_requests=50))
    assert result.requests == len(CONVERSATION.requests) - 50
    assert result.answers_per_s == pytest.approx(result.rate_per_s, rel=0.05)


def test_a_closed_loop_is_the_same_every_time_and_ends_in_time() -> None:
    timed = scenario(loop=Loop(concurrency=24, seconds=30.0), skip_s=10.0)

    first, second = simulate(SESSIONS, timed), simulate(SESSIONS, timed)

    assert figures(first) == figures(second)
    record = Simulation(SESSIONS, timed).run()
    last_s = record.outcomes[-1].arrival_s
    assert 25.0 < last_s - record.outcomes[0].arrival_s < 30.0
    counted = record.outcomes[record.skip_requests :]
    assert first.requests == len(counted) and counted[0].arrival_s >= record.outcomes[0].arrival_s + 10.0


def test_long_prompts_of_a_class_that_is_evictable_leave_for_late_ones_and_are_answered_in_full() -> None:
    def run(*, evictable: bool) -> Simulation:
        classes = (
            PriorityClassSettings(name="chat", slo_ttft_s=1.0),
            PriorityClassSettings(name="batch", fills_idle=True, evictable=evictable),
        )

        def request(number: int, arrival_s: float, tokens: int, priority: str) -> TraceRequest:
            blocks = tuple(range(1000 * number, 1000 * number + -(-tokens // 512)))
            return TraceRequest(arrival_s, tokens, 20, blocks, priority=priority)

        batch = [request(number, 0.1 * number, 40_000, "batch") for number in range(3)]
        chat = [request(10 + number, 1.0 + number, 1000, "chat") for number in range(8)]
        trace = Trace("evicted", 512, (*batch, *chat))
        made = Simulation(trace, Scenario(SchedulingSettings(classes=classes), ENGINE, instances=1))
        made.run()
        return made

    stays, leaves = run(evictable=False), run(evictable=True)

    late = [
        sum(each.first_token_s - each.arrival_s > 1.0 for each in made._outcomes if each.input_tokens == 1000)
        for made in (stays, leaves)
    ]
    assert (stays.replicas[0].requests.evictions, late[1] < late[0]) == (0, True)
    assert 0 < leaves.replicas[0].requests.evictions <= 3 * MOST_EVICTIONS
    assert {each.outcome for each in leaves._outcomes} == {Outcome.COMPLETED}


def test_in_a_fleet_of_two_kinds_each_has_its_own_speed_and_the_faster_one_serves_more() -> None:
    # given a rate that both kinds keep up with: past it every instance is as full as another
    slower = replace(ENGINE, costs=ENGINE.costs.slowed(3.0))
    simulation = Simulation(CONVERSATION.at_rate(0.8), scenario("dualmap-least-cost", engines=(ENGINE, slower)))

    outcomes = simulation.run().outcomes

    kinds = ("i001", "i003"), ("i002", "i004")
    served = [sum(outcome.instance_id in names for outcome in outcomes) for names in kinds]
    assert served[0] > 1.2 * served[1] > 0
    loads = simulation.replicas[0].pool.loads()
    rates = [[loads[name].prefill_tokens_per_s for name in names] for names in kinds]
    assert rates[0][0] == rates[0][1] == pytest.approx(3 * rates[1][0], rel=0.15)
    assert rates[1][0] == rates[1][1]
