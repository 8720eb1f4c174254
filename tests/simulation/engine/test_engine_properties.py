"""Invariants of the engine under any load."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_scheduler import StepPlan
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, EngineStatistics, Event, EventKind
from dualmap.simulation.engine.step_time import StepCosts

COSTS = StepCosts(
    overhead_s=0.003,
    weights_s=0.011,
    token_s=0.0007,
    attention_pair_s=1.3e-6,
    sequence_s=0.0002,
    context_token_s=1.7e-5,
)
CONFIG = EngineConfig(
    costs=COSTS,
    kv_capacity_tokens=24 * 8,
    block_tokens=8,
    max_num_batched_tokens=32,
    max_num_seqs=6,
    max_model_len=24 * 8,
)


@dataclass(frozen=True)
class Call:
    """One thing done to an engine after a pause; ``abort`` names an earlier request by its index."""

    pause_s: float
    prompt_tokens: int
    output_tokens: int
    family: int
    shared_blocks: int
    abort: int | None


configs = st.sampled_from((CONFIG, replace(CONFIG, prefill_first=True), replace(CONFIG, by_priority=True)))
calls = st.lists(
    st.builds(
        Call,
        pause_s=st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.1, 0.4]) | st.floats(0, 0.3),
        prompt_tokens=st.integers(1, 120),
        output_tokens=st.integers(1, 60),
        family=st.integers(0, 2),
        shared_blocks=st.integers(0, 15),
        abort=st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=25,
)


def make_request(index: int, call: Call) -> EngineRequest:
    """Requests of one family share their first blocks; behind those, every request has its own."""
    blocks = call.prompt_tokens // CONFIG.block_tokens
    shared = min(blocks, call.shared_blocks)
    hashes = [call.family * 1000 + block for block in range(shared)]
    hashes += [10_000 * (index + 1) + block for block in range(blocks - shared)]
    priority = call.family  # some order that is not that of arrival
    return EngineRequest(f"r{index}", call.prompt_tokens, call.output_tokens, tuple(hashes), priority=priority)


def assert_consistent(engine: Engine) -> None:
    """The pool's books against what the sequences say; reads the engine's insides on purpose."""
    pool, batch = engine._scheduler.pool, engine._scheduler.batch
    holders: dict[int, int] = {}
    private = 0
    for sequence in engine._scheduler.running.values():
        for block in sequence.request.block_hashes[: sequence.held_blocks]:
            holders[block] = holders.get(block, 0) + 1
        private += batch.kv_blocks(sequence) - sequence.held_blocks if sequence.decoding else sequence.private_blocks
    assert pool.private_blocks == private
    assert {block: count for block, count in pool._holders.items() if count} == holders
    assert set(pool._idle) == {block for block, count in pool._holders.items() if not count}
    assert 0 <= pool.used_blocks <= pool.total_blocks
    assert pool.empty_blocks >= 0
    assert pool.used_blocks + pool.available_blocks == pool.total_blocks
    for block in pool._holders:  # closed under prefixes: eviction took leaves first
        if block % 1000:
            assert block - 1 in pool._holders


def drive(
    engine: Engine,
    plan: list[Call],
    *,
    polls: int = 0,
    check: bool = False,
    seen: list[EngineStatistics] | None = None,
) -> tuple[list[Event], set[str]]:
    """Apply the calls, asking ``polls`` more times in every pause; returns all events and the aborted ids.

    ``seen`` collects the engine's state at every one of these times.
    """
    now_s = 0.0
    events: list[Event] = []
    aborted: set[str] = set()
    for index, call in enumerate(plan):
        for poll in range(polls):
            events += engine.advance(now_s + call.pause_s * (poll + 0.5) / (polls + 0.5))
            if seen is not None:
                seen.append(engine.statistics())
            if check:
                assert_consistent(engine)
        now_s += call.pause_s
        events += engine.advance(now_s)
        engine.submit(make_request(index, call), now_s)
        if call.abort is not None and engine.abort(f"r{call.abort}", now_s):
            aborted.add(f"r{call.abort}")
        if check:
            assert_consistent(engine)
    while (next_s := engine.next_event_s()) is not None:
        now_s = max(now_s, next_s)
        events += engine.advance(now_s)
        if check:
            assert_consistent(engine)
    return events, aborted


def planned_tokens(engine: Engine) -> list[int]:
    """The tokens of every step that an engine plans, one at a time, from now on."""
    tokens: list[int] = []
    scheduler = engine._scheduler
    plan_step = scheduler.plan_step

    def noting(start_s: float) -> StepPlan:
        step = plan_step(start_s)
        tokens.append(step.prefill_tokens + scheduler.batch.size)
        return step

    scheduler.plan_step = noting
    return tokens


@settings(max_examples=150, derandomize=True)
@given(calls, configs)
def test_no_request_is_lost_and_no_block_either(plan: list[Call], config: EngineConfig) -> None:
    engine = Engine(config)
    events, aborted = drive(engine, plan, polls=2, check=True)
    wanted = {f"r{index}": call.output_tokens for index, call in enumerate(plan)}
    finished = [(event.request_id, event.tokens) for event in events if event.kind is EventKind.FINISHED]
    assert len(finished) == len(dict(finished))
    assert dict(finished) == {name: tokens for name, tokens in wanted.items() if name not in aborted}
    first = [event.request_id for event in events if event.kind is EventKind.FIRST_TOKEN]
    assert len(first) == len(set(first))
    assert set(dict(finished)) <= set(first)
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.used_blocks) == (0, 0, 0)
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)


@settings(max_examples=100, derandomize=True)
@given(calls)
def test_no_step_exceeds_the_token_budget_and_every_token_is_counted(plan: list[Call]) -> None:
    engine = Engine(CONFIG, max_run_steps=1)
    steps = planned_tokens(engine)
    events, _aborted = drive(engine, plan)
    assert max(steps, default=0) <= CONFIG.max_num_batched_tokens
    statistics = engine.statistics()
    assert len(steps) == statistics.steps
    first = sum(event.kind is EventKind.FIRST_TOKEN for event in events)
    if not statistics.preemptions and not any(call.abort is not None for call in plan):
        # Every generated token but a request's first is computed in a decode step of its own.
        assert sum(steps) == statistics.prefill_tokens + statistics.generated_tokens - first
        assert statistics.prefill_tokens == statistics.queried_tokens - statistics.hit_tokens


@settings(max_examples=100, derandomize=True)
@given(calls)
def test_the_same_calls_give_the_same_events_to_the_last_digit(plan: list[Call]) -> None:
    assert drive(Engine(CONFIG), plan) == drive(Engine(CONFIG), plan)


@settings(max_examples=100, derandomize=True)
@given(calls, configs, st.integers(1, 7))
def test_asking_more_often_changes_nothing(plan: list[Call], config: EngineConfig, polls: int) -> None:
    # A poll at the exact end of a step starts the next one, which a submission at that same moment would otherwise
    # have joined; pauses here do not end on steps, so answers must agree to the last digit.
    seldom, often = Engine(config), Engine(config)
    assert drive(seldom, plan) == drive(often, plan, polls=polls)
    assert seldom.statistics() == often.statistics()


@settings(max_examples=150, derandomize=True)
@given(calls, configs)
def test_many_decode_steps_at_once_equal_one_at_a_time(plan: list[Call], config: EngineConfig) -> None:
    fast, slow = Engine(config), Engine(config, max_run_steps=1)
    fast_seen: list[EngineStatistics] = []
    slow_seen: list[EngineStatistics] = []
    fast_events, fast_aborted = drive(fast, plan, polls=1, seen=fast_seen)
    slow_events, slow_aborted = drive(slow, plan, polls=1, seen=slow_seen)
    assert fast_aborted == slow_aborted
    assert fast_seen == slow_seen
    assert [event._replace(time_s=0.0) for event in fast_events] == [
        event._replace(time_s=0.0) for event in slow_events
    ]
    for one, other in zip(fast_events, slow_events, strict=True):
        assert one.time_s == pytest.approx(other.time_s, rel=1e-9)
    assert fast.statistics() == slow.statistics()


@settings(max_examples=60, derandomize=True)
@given(calls, configs, st.floats(0, 3))
def test_aborting_everything_at_any_moment_frees_all(plan: list[Call], config: EngineConfig, abort_s: float) -> None:
    engine = Engine(config)
    now_s = 0.0
    for index, call in enumerate(plan):
        now_s += call.pause_s
        engine.submit(make_request(index, call), now_s)
    now_s += abort_s
    engine.advance(now_s)
    for index in range(len(plan)):
        engine.abort(f"r{index}", now_s)
        assert_consistent(engine)
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.used_blocks) == (0, 0, 0)
    assert all(event.kind is not EventKind.FINISHED for event in engine.advance(now_s + 99))
    assert engine.next_event_s() is None
