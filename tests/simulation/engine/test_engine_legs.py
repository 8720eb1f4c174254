"""Prefill and decode legs in the engine model, with times computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind, RequestRefusedError
from dualmap.simulation.engine.step_time import StepCosts

# 10 ms per step and 1 ms per token, blocks of 10 tokens, 20 tokens in a step.
COSTS = StepCosts(
    overhead_s=0.010, weights_s=0.0, token_s=0.001, attention_pair_s=0.0, sequence_s=0.0, context_token_s=0.0
)
CONFIG = EngineConfig(
    COSTS, 160, block_tokens=10, max_num_batched_tokens=20, max_num_seqs=4, max_model_len=160, staged_timeout_s=5.0
)
PROMPT = (1, 2, 3, 4, 5)


def prefill_leg(name: str, prompt_tokens: int, hashes: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest(name, prompt_tokens, 1, hashes, stages_kv=True)


def decode_leg(name: str, prompt_tokens: int, output_tokens: int, hashes: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest(name, prompt_tokens, output_tokens, hashes, awaits_kv=True)


def seen(events: list[Event], kind: EventKind) -> dict[str, tuple[float, int]]:
    return {event.request_id: (round(event.time_s, 6), event.tokens) for event in events if event.kind is kind}


def test_a_prefill_leg_ends_with_its_first_token_and_keeps_its_blocks_until_they_are_pulled() -> None:
    # given a prompt of five blocks, in steps of 30, 30 and 20 ms
    engine = Engine(CONFIG)
    engine.submit(prefill_leg("a", 50, PROMPT), 1.0)
    # when it runs to its end
    events = engine.advance(2.0)
    # then it ended with one token, and its blocks are taken still
    assert seen(events, EventKind.FIRST_TOKEN) == {"a": (1.08, 0)}
    assert seen(events, EventKind.FINISHED) == {"a": (1.08, 1)}
    assert seen(events, EventKind.STAGED) == {"a": (1.08, 50)}
    statistics = engine.statistics()
    assert (statistics.running, statistics.staged, statistics.used_blocks) == (0, 1, 5)
    # and pulling them leaves the prompt in the prefix cache
    assert engine.release_staged("a", 2.0)
    statistics = engine.statistics()
    assert (statistics.staged, statistics.used_blocks, statistics.cached_blocks) == (0, 0, 5)
    assert not engine.release_staged("a", 2.0)
    assert engine.next_event_s() is None


def test_staged_kv_that_nobody_pulls_is_freed_after_its_timeout_and_counted() -> None:
    # given two prompts staged at 1.08 and 2.02
    engine = Engine(CONFIG)
    engine.submit(prefill_leg("a", 50), 1.0)
    engine.advance(1.9)
    engine.submit(prefill_leg("b", 10), 2.0)
    engine.advance(3.0)
    # when they are not pulled
    assert engine.next_event_s() == pytest.approx(6.08)
    events = engine.advance(9.0)
    # then each is freed 5 s after it was staged
    assert seen(events, EventKind.EXPIRED) == {"a": (6.08, 50), "b": (7.02, 10)}
    statistics = engine.statistics()
    assert (statistics.expired, statistics.staged, statistics.used_blocks) == (2, 0, 0)
    assert not engine.has_staged("a")
    assert engine.next_event_s() is None


def test_a_prompt_waits_for_memory_that_staged_kv_occupies() -> None:
    # given staged KV of 12 of 16 blocks, staged at 0.18 (six steps of 30 ms)
    engine = Engine(CONFIG)
    engine.submit(prefill_leg("a", 120), 0.0)
    engine.advance(1.0)
    # when a prompt of six blocks comes, then nothing happens until the timeout
    engine.submit(prefill_leg("b", 60), 1.0)
    assert engine.advance(5.0) == []
    assert engine.next_event_s() == pytest.approx(5.18)
    events = engine.advance(9.0)
    assert seen(events, EventKind.SCHEDULED) == {"b": (5.18, 0)}
    assert seen(events, EventKind.FINISHED) == {"b": (5.27, 1)}


def test_a_pull_lets_a_waiting_prompt_in_at_once() -> None:
    engine = Engine(CONFIG)
    engine.submit(prefill_leg("a", 120), 0.0)
    engine.submit(prefill_leg("b", 60), 0.0)
    engine.advance(1.0)
    assert engine.release_staged("a", 2.5)
    assert engine.next_event_s() == 2.5
    assert seen(engine.advance(9.0), EventKind.FINISHED) == {"b": (2.59, 1)}


def test_what_times_out_while_a_mixed_instance_decodes_is_freed_at_the_end_of_that_step() -> None:
    # given KV staged at 0.02 and an answer of 100 tokens on the same instance, whose steps take 11 ms from 0.04 on
    engine = Engine(replace(CONFIG, staged_timeout_s=0.5))
    engine.submit(prefill_leg("a", 10), 0.0)
    engine.advance(0.02)
    engine.submit(EngineRequest("b", 10, 100), 0.02)
    # when it times out at 0.52, in the 44th of these steps
    events = engine.advance(0.6)
    # then it is freed where that step ends
    assert seen(events, EventKind.EXPIRED) == {"a": (0.524, 10)}
    assert seen(engine.advance(9.0), EventKind.FINISHED) == {"b": (1.129, 100)}


def test_a_decode_leg_reserves_its_blocks_and_begins_when_its_kv_is_there() -> None:
    # given a decode leg of a prompt of 45 tokens
    engine = Engine(CONFIG)
    engine.submit(decode_leg("a", 45, 3, PROMPT[:4]), 1.0)
    # when it is alone, then it asks for its KV at once and holds five blocks
    assert seen(engine.advance(1.1), EventKind.PULLING) == {"a": (1.0, 45)}
    statistics = engine.statistics()
    assert (statistics.waiting, statistics.pulling, statistics.running, statistics.used_blocks) == (1, 1, 0, 5)
    assert engine.next_event_s() is None
    # and its last prompt token is computed in a step of 11 ms, two more tokens take 11 ms each
    assert engine.receive("a", 1.2)
    events = engine.advance(9.0)
    assert seen(events, EventKind.SCHEDULED) == {"a": (1.2, 44)}
    assert seen(events, EventKind.FIRST_TOKEN) == {"a": (1.211, 0)}
    assert seen(events, EventKind.FINISHED) == {"a": (1.233, 3)}
    statistics = engine.statistics()
    assert (statistics.prefill_tokens, statistics.used_blocks, statistics.cached_blocks) == (1, 0, 4)


def test_only_what_the_decode_instance_does_not_hold_is_moved() -> None:
    # given a decode instance that has served a prompt of four blocks
    engine = Engine(CONFIG)
    engine.submit(EngineRequest("former", 45, 1, PROMPT[:4]), 0.0)
    engine.advance(1.0)
    # when the conversation's next turn comes with 15 tokens more
    engine.submit(decode_leg("a", 60, 2, (*PROMPT, 6)), 1.0)
    events = engine.advance(1.0)
    assert seen(events, EventKind.PULLING) == {"a": (1.0, 20)}
    # then the hit is told with the first token
    assert engine.receive("a", 1.5)
    assert seen(engine.advance(9.0), EventKind.FIRST_TOKEN) == {"a": (1.511, 40)}


def test_a_transfer_neither_stops_decoding_nor_the_queue_behind_it() -> None:
    # given an answer that decodes in steps of 11 ms from 0.02 on, and a decode leg that waits for its KV
    engine = Engine(CONFIG)
    engine.submit(EngineRequest("b", 10, 5), 0.0)
    engine.submit(decode_leg("a", 50, 2), 0.0)
    engine.submit(EngineRequest("c", 10, 1), 0.0)
    events = engine.advance(1.0)
    # then the others are served as if it were not there
    assert seen(events, EventKind.FIRST_TOKEN) == {"b": (0.03, 0), "c": (0.03, 0)}
    assert seen(events, EventKind.FINISHED)["b"] == (0.074, 5)


def test_kv_that_arrives_in_a_step_is_used_in_the_next_one_ahead_of_the_queue() -> None:
    # given decode steps of 11 ms from 0.02 on, KV that comes in the step until 0.031, and a prompt of a whole budget
    engine = Engine(CONFIG)
    engine.submit(EngineRequest("b", 10, 50), 0.0)
    engine.submit(decode_leg("a", 50, 2), 0.0)
    engine.advance(0.025)
    engine.submit(EngineRequest("c", 20, 1), 0.025)
    assert engine.receive("a", 0.03)
    # then the next step decodes one, computes one token of a and 18 of c: 30 ms
    events = engine.advance(0.062)
    assert seen(events, EventKind.FIRST_TOKEN) == {"a": (0.061, 0)}


def test_a_preempted_decode_leg_is_prefilled_where_it_is() -> None:
    # given a long answer, and a decode leg whose KV does not fit beside it in the end
    engine = Engine(replace(CONFIG, kv_capacity_tokens=100))
    engine.submit(EngineRequest("a", 30, 40), 0.0)
    engine.submit(decode_leg("b", 30, 40), 0.0)
    engine.advance(0.03)  # the first step has no budget left for b
    assert engine.receive("b", 0.035)
    # when both run to their ends
    events = engine.advance(99.0)
    # then b was recomputed with what it had generated, and no KV was asked for again
    preempted = seen(events, EventKind.PREEMPTED)
    assert list(preempted) == ["b"]
    assert seen(events, EventKind.FINISHED)["b"][1] == 40
    assert engine.statistics().prefill_tokens == 30 + 1 + 30 + preempted["b"][1]
    assert seen(events, EventKind.PULLING) == {}


def test_a_decode_leg_whose_transfer_fails_is_prefilled_where_it_is() -> None:
    engine = Engine(CONFIG)
    engine.submit(decode_leg("a", 50, 1), 1.0)
    engine.advance(1.0)
    assert engine.lose_kv("a", 2.0)
    # 30, 30 and 20 ms, as a prompt of this length takes
    assert seen(engine.advance(9.0), EventKind.FIRST_TOKEN) == {"a": (2.08, 0)}
    assert not engine.lose_kv("a", 9.0)


def test_an_abort_frees_a_decode_leg_that_waits_for_its_kv_and_what_comes_later_is_not_wanted() -> None:
    engine = Engine(CONFIG)
    engine.submit(decode_leg("a", 50, 1), 1.0)
    engine.advance(1.0)
    assert engine.abort("a", 1.5)
    assert engine.statistics().used_blocks == 0
    assert not engine.receive("a", 1.6)
    assert engine.next_event_s() is None


def test_an_abort_leaves_staged_kv_where_it_is() -> None:
    engine = Engine(CONFIG)
    engine.submit(prefill_leg("a", 50), 0.0)
    engine.advance(1.0)
    assert not engine.abort("a", 1.0)
    assert engine.has_staged("a")


@pytest.mark.parametrize(
    "request_",
    [EngineRequest("a", 10, 2, stages_kv=True), EngineRequest("a", 10, 1, stages_kv=True, awaits_kv=True)],
)
def test_a_prefill_leg_that_would_decode_is_refused(request_: EngineRequest) -> None:
    with pytest.raises(RequestRefusedError, match="a prefill leg ends with its first token"):
        Engine(CONFIG).submit(request_, 0.0)


def test_the_id_of_staged_kv_is_taken() -> None:
    engine = Engine(CONFIG)
    engine.submit(prefill_leg("a", 10), 0.0)
    engine.advance(1.0)
    with pytest.raises(RequestRefusedError, match="already in this engine"):
        engine.submit(prefill_leg("a", 10), 1.0)


calls = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.003, 0.05, 0.4]) | st.floats(0, 0.3),
        st.sampled_from(["whole", "prefill", "decode", "receive", "lose", "release", "abort"]),
        st.integers(1, 90),
        st.integers(1, 40),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=40,
)


def drive(engine: Engine, plan: list[tuple[float, str, int, int, int]], polls: int) -> list[Event]:
    """Do what the plan says, asking ``polls`` more times in every pause; then answer every transfer."""
    events: list[Event] = []
    now_s = 0.0
    for index, (pause_s, call, prompt_tokens, output_tokens, other) in enumerate(plan):
        for poll in range(polls):
            events += engine.advance(now_s + pause_s * (poll + 0.5) / (polls + 0.5))
        now_s += pause_s
        events += engine.advance(now_s)
        hashes = tuple(1000 * (other % 2) + block for block in range(prompt_tokens // CONFIG.block_tokens))
        match call:
            case "receive":
                engine.receive(f"r{other}", now_s)
            case "lose":
                engine.lose_kv(f"r{other}", now_s)
            case "release":
                engine.release_staged(f"r{other}", now_s)
            case "abort":
                engine.abort(f"r{other}", now_s)
            case "prefill":
                engine.submit(prefill_leg(f"r{index}", prompt_tokens, hashes), now_s)
            case "decode":
                engine.submit(decode_leg(f"r{index}", prompt_tokens, output_tokens, hashes), now_s)
            case _:
                engine.submit(EngineRequest(f"r{index}", prompt_tokens, output_tokens, hashes), now_s)
    for turn in range(2 * len(plan) + 2):
        now_s += 20.0 * (turn + 1)
        events += engine.advance(now_s)
        for index in range(len(plan)):
            engine.receive(f"r{index}", now_s)
    return events


@settings(max_examples=150)
@given(plan=calls, prefill_first=st.booleans())
def test_every_leg_ends_and_leaves_no_block_behind_however_often_one_looks(
    plan: list[tuple[float, str, int, int, int]], prefill_first: bool
) -> None:
    config = replace(CONFIG, prefill_first=prefill_first)
    often, seldom = Engine(config), Engine(config)
    events = drive(often, plan, polls=3)
    assert drive(seldom, plan, polls=0) == events
    assert often.statistics() == seldom.statistics()
    statistics = often.statistics()
    assert (statistics.waiting, statistics.running, statistics.staged, statistics.used_blocks) == (0, 0, 0, 0)
    assert often.next_event_s() is None
    assert statistics.expired == sum(event.kind is EventKind.EXPIRED for event in events)
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)
