"""The engine model, by example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind, RequestRefusedError
from dualmap.simulation.engine.step_time import StepCosts, attention_pairs

# Round figures, so that expected times can be read off: 10 ms per step and 1 ms per token.
COSTS = StepCosts(
    overhead_s=0.010, weights_s=0.0, token_s=0.001, attention_pair_s=0.0, sequence_s=0.0, context_token_s=0.0
)


def make_config(**changes: int) -> EngineConfig:
    config = EngineConfig(COSTS, 160, block_tokens=10, max_num_batched_tokens=20, max_num_seqs=4, max_model_len=160)
    return replace(config, **changes)


def make_request(name: str, prompt_tokens: int, output_tokens: int, hashes: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest(name, prompt_tokens, output_tokens, hashes)


def times_of(events: list[Event], kind: EventKind) -> dict[str, float]:
    return {event.request_id: round(event.time_s, 6) for event in events if event.kind is kind}


def test_a_prompt_is_prefilled_in_chunks_of_the_budget_and_then_decodes_token_by_token() -> None:
    # given a prompt of two and a half budgets
    engine = Engine(make_config())
    engine.submit(make_request("a", 50, 3), 1.0)
    # when it runs to its end
    events = engine.advance(100.0)
    # then its prefill takes three steps (30, 30 and 20 ms) and two more tokens take 11 ms each
    assert times_of(events, EventKind.FIRST_TOKEN) == {"a": 1.08}
    assert times_of(events, EventKind.FINISHED) == {"a": 1.102}
    assert engine.statistics().steps == 5


def test_decoding_sequences_come_first_in_the_budget() -> None:
    # given a decoding sequence and a long prompt that arrives at 0.035, in its decode step from 0.031 to 0.042
    engine = Engine(make_config(), max_run_steps=1)
    engine.submit(make_request("a", 11, 10), 0.0)
    engine.advance(0.035)
    engine.submit(make_request("b", 40, 1), 0.035)
    # when they share steps
    prefilled, events = [], []
    for _ in range(4):
        before = engine.statistics().prefill_tokens
        events += engine.advance(engine.next_event_s() or 0.0)
        prefilled.append(engine.statistics().prefill_tokens - before)
    # then b's prompt gets 19 of 20 tokens in a step: 19, 19 and 2
    assert prefilled == [19, 19, 2, 0]
    # and waits for the end of the step that was under way
    assert times_of(events, EventKind.SCHEDULED) == {"b": 0.043}


def test_with_prefill_first_decoding_waits_while_prompts_are_prefilled() -> None:
    # given a decoding sequence and a long prompt that arrives in its decode step from 0.031 to 0.042
    engine = Engine(replace(make_config(), prefill_first=True), max_run_steps=1)
    engine.submit(make_request("a", 11, 5), 0.0)
    engine.advance(0.035)
    engine.submit(make_request("b", 40, 2), 0.035)
    # when both are served
    events = engine.advance(9.0)
    # then b's prompt takes two whole budgets (30 ms each) in which a generates nothing
    assert times_of(events, EventKind.FIRST_TOKEN)["b"] == 0.103
    # and a's third token comes with b's second, in the first step of both
    assert times_of(events, EventKind.FINISHED)["b"] == 0.115


def test_requests_submitted_to_an_idle_engine_at_one_time_share_its_first_step() -> None:
    engine = Engine(make_config())
    engine.submit(make_request("a", 5, 1), 1.0)
    engine.submit(make_request("b", 5, 1), 1.0)
    assert times_of(engine.advance(9.0), EventKind.FIRST_TOKEN) == {"a": 1.02, "b": 1.02}


def test_a_request_that_arrives_at_the_very_end_of_a_decode_step_joins_the_next_one() -> None:
    # given a sequence in the middle of a long run of decode steps
    engine = Engine(make_config())
    engine.submit(make_request("a", 10, 100), 0.0)
    engine.advance(0.035)
    boundary_s = engine.next_step_end_s()
    assert boundary_s is not None
    # when another one comes exactly between two steps, before the later one has been started by asking
    engine.submit(make_request("b", 10, 1), boundary_s)
    # then it is scheduled there and then; had it been asked first, the next step would have been under way
    assert times_of(engine.advance(boundary_s), EventKind.SCHEDULED) == {"b": round(boundary_s, 6)}


def test_waiting_requests_are_served_in_order_of_arrival() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    for name in "abc":
        engine.submit(make_request(name, 5, 2), 0.0)
    events = engine.advance(9.0)
    assert [event.request_id for event in events if event.kind is EventKind.FIRST_TOKEN] == ["a", "b", "c"]
    assert engine.statistics().running == 0


def test_a_prefix_is_computed_once() -> None:
    # given a finished request with two full blocks
    engine = Engine(make_config())
    engine.submit(make_request("a", 25, 1, (1, 2)), 0.0)
    engine.advance(1.0)
    # when another one shares them
    engine.submit(make_request("b", 30, 1, (1, 2, 3)), 1.0)
    events = engine.advance(2.0)
    # then only its last 10 tokens are computed
    first = next(event for event in events if event.kind is EventKind.FIRST_TOKEN)
    assert first.tokens == 20
    assert round(first.time_s, 6) == 1.02
    assert engine.statistics().hit_tokens == 20
    assert engine.statistics().queried_tokens == 55


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    engine = Engine(make_config())
    engine.submit(make_request("a", 20, 1, (1, 2)), 0.0)
    engine.advance(1.0)
    engine.submit(make_request("b", 20, 1, (1, 2)), 1.0)
    assert [event.tokens for event in engine.advance(2.0) if event.kind is EventKind.FIRST_TOKEN] == [10]


def test_two_running_requests_share_the_blocks_of_their_prefix() -> None:
    engine = Engine(make_config())
    engine.submit(make_request("a", 20, 50, (1, 2)), 0.0)
    engine.advance(0.05)
    engine.submit(make_request("b", 30, 50, (1, 2, 3)), 0.05)
    engine.advance(0.09)
    # a: 2 blocks and 1 of its own; b: the same 2, and 2 more
    assert engine.statistics().used_blocks == 5


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    # given a cache full of two prompts, the second one used last
    engine = Engine(make_config(kv_capacity_tokens=80))
    engine.submit(make_request("a", 40, 1, (1, 2, 3, 4)), 0.0)
    engine.submit(make_request("b", 40, 1, (11, 12, 13, 14)), 1.0)
    engine.advance(2.0)
    # when three blocks are wanted
    engine.submit(make_request("c", 29, 1, (21, 22)), 2.0)
    engine.advance(3.0)
    # then the end of the first prompt goes, its head stays
    pool = engine._scheduler.pool
    hits = [pool.match(prompt, 4)[0] for prompt in ((1, 2, 3, 4), (11, 12, 13, 14), (21, 22))]
    assert hits == [1, 4, 2]


def test_a_prompt_waits_until_all_its_blocks_fit() -> None:
    engine = Engine(make_config(kv_capacity_tokens=100))
    engine.submit(make_request("a", 60, 20), 0.0)
    engine.submit(make_request("b", 40, 1), 0.0)
    events = engine.advance(9.0)
    assert times_of(events, EventKind.SCHEDULED)["b"] == times_of(events, EventKind.FINISHED)["a"]
    assert engine.statistics().preemptions == 0


def test_the_latest_sequence_is_preempted_when_memory_runs_out_and_finishes_later() -> None:
    # given two sequences that fit at first but not in the end
    engine = Engine(make_config(kv_capacity_tokens=100))
    engine.submit(make_request("a", 30, 40), 0.0)
    engine.submit(make_request("b", 30, 40), 0.0)
    # when both run to their ends
    events = engine.advance(99.0)
    # then b gives way, is recomputed with what it had generated, and still generates 40 tokens
    preempted = [event for event in events if event.kind is EventKind.PREEMPTED]
    assert [event.request_id for event in preempted] == ["b"]
    finished = [event for event in events if event.kind is EventKind.FINISHED]
    assert [(event.request_id, event.tokens) for event in finished] == [("a", 40), ("b", 40)]
    assert sum(event.kind is EventKind.FIRST_TOKEN for event in events) == 2
    statistics = engine.statistics()
    assert statistics.prefill_tokens == 60 + 30 + preempted[0].tokens
    assert statistics.generated_tokens == 80


def ranked(name: str, priority: int, prompt_tokens: int, output_tokens: int) -> EngineRequest:
    return replace(make_request(name, prompt_tokens, output_tokens), priority=priority)


@pytest.mark.parametrize(("by_priority", "order"), [(True, ["a", "c", "e", "b", "d"]), (False, list("abcde"))])
def test_by_priority_the_least_goes_first_and_equal_ones_as_they_came(by_priority: bool, order: list[str]) -> None:
    engine = Engine(replace(make_config(max_num_seqs=1), by_priority=by_priority))
    engine.submit(ranked("a", 9, 5, 2), 0.0)
    engine.advance(0.001)  # what runs continues, whatever comes
    for name, priority in zip("bcde", (5, 0, 5, 0), strict=True):
        engine.submit(ranked(name, priority, 5, 2), 0.001)
    events = engine.advance(9.0)
    assert [event.request_id for event in events if event.kind is EventKind.FIRST_TOKEN] == order


def test_a_long_prompt_of_low_priority_that_was_begun_is_not_overtaken() -> None:
    # given a prompt of ten steps under prefill
    engine = Engine(replace(make_config(), by_priority=True))
    engine.submit(ranked("long", 9, 100, 1), 0.0)
    engine.advance(0.001)
    # when one of a higher priority comes, then it waits for all of its steps, of 30 ms each, and shares none
    engine.submit(ranked("short", 0, 5, 1), 0.001)
    assert times_of(engine.advance(9.0), EventKind.FIRST_TOKEN) == {"long": 0.15, "short": 0.165}


@pytest.mark.parametrize(("by_priority", "loser"), [(True, "a"), (False, "b")])
def test_by_priority_the_least_important_is_preempted_when_memory_runs_out(by_priority: bool, loser: str) -> None:
    engine = Engine(replace(make_config(kv_capacity_tokens=100), by_priority=by_priority))
    engine.submit(ranked("a", 1, 30, 40), 0.0)
    engine.submit(ranked("b", 0, 30, 40), 0.0)
    events = engine.advance(99.0)
    assert [event.request_id for event in events if event.kind is EventKind.PREEMPTED] == [loser]
    assert engine.statistics().generated_tokens == 80


def test_by_priority_a_prompt_under_prefill_takes_memory_from_a_less_important_answer() -> None:
    # given an answer that grows until a half-done prompt of a higher priority finds no room for its next chunk
    engine = Engine(replace(make_config(kv_capacity_tokens=130), by_priority=True))
    engine.submit(ranked("line", 1, 20, 100), 0.0)
    engine.advance(0.5)
    engine.submit(ranked("person", 0, 60, 2), 0.5)
    # when it is computed, then the answer waits, and both end
    events = engine.advance(99.0)
    assert [event.request_id for event in events if event.kind is EventKind.PREEMPTED] == ["line"]
    assert list(times_of(events, EventKind.FINISHED)) == ["person", "line"]
    assert engine.statistics().used_blocks == 0


@pytest.mark.parametrize("abort_s", [0.0, 0.015, 0.055, 0.3])
def test_an_abort_frees_everything_at_any_moment(abort_s: float) -> None:
    engine = Engine(make_config())
    engine.submit(make_request("a", 33, 100, (1, 2, 3)), 0.0)
    engine.advance(abort_s)
    assert engine.abort("a", abort_s)
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.used_blocks) == (0, 0, 0)
    assert not engine.abort("a", abort_s)
    assert times_of(engine.advance(9.0), EventKind.FINISHED) == {}
    assert engine.next_event_s() is None


def test_an_abort_of_a_waiting_request_lets_the_next_one_through() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    for name in "abc":
        engine.submit(make_request(name, 5, 2), 0.0)
    assert engine.abort("b", 0.0)
    assert list(times_of(engine.advance(9.0), EventKind.FINISHED)) == ["a", "c"]


def test_next_event_says_when_to_look_again() -> None:
    engine = Engine(make_config())
    assert engine.next_event_s() is None
    engine.submit(make_request("a", 10, 5), 3.0)
    assert engine.next_event_s() == 3.0
    assert [event.kind for event in engine.advance(3.0)] == [EventKind.SCHEDULED]
    first_token_s = engine.next_event_s()
    assert first_token_s == pytest.approx(3.02)
    assert [event.kind for event in engine.advance(first_token_s)] == [EventKind.FIRST_TOKEN]
    assert engine.next_step_end_s() == pytest.approx(3.031)
    finished_s = engine.next_event_s()
    assert finished_s == pytest.approx(3.064)
    assert [event.kind for event in engine.advance(finished_s)] == [EventKind.FINISHED]
    assert engine.next_event_s() is None


def test_generated_tokens_grow_with_the_steps() -> None:
    engine = Engine(make_config())
    engine.submit(make_request("a", 10, 50), 0.0)
    seen = []
    for now_s in (0.01, 0.02, 0.0309, 0.0311, 0.1):
        engine.advance(now_s)
        seen.append(engine.generated_tokens("a"))
    assert seen == [0, 1, 1, 2, 8]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (make_request("x", 0, 1), "at least one prompt token"),
        (make_request("x", 1, 0), "at least one prompt token"),
        (make_request("x", 150, 11), "exceed the limit of 160"),
        (make_request("x", 19, 1, (1, 2)), "more block hashes"),
        (make_request("taken", 1, 1), "already in this engine"),
    ],
)
def test_what_can_never_be_served_is_refused_and_leaves_no_trace(request_: EngineRequest, reason: str) -> None:
    engine = Engine(make_config())
    engine.submit(make_request("taken", 1, 1), 0.0)
    before = engine.statistics()
    with pytest.raises(RequestRefusedError, match=reason):
        engine.submit(request_, 0.0)
    assert engine.statistics() == before


def test_time_must_not_go_back() -> None:
    engine = Engine(make_config())
    engine.advance(5.0)
    with pytest.raises(ValueError, match="time went back"):
        engine.submit(make_request("a", 1, 1), 4.0)


@pytest.mark.parametrize(
    "changes", [{"kv_capacity_tokens": 5}, {"max_num_batched_tokens": 3}, {"block_tokens": 0}, {"max_num_seqs": 0}]
)
def test_an_impossible_configuration_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        make_config(**changes)


def test_attention_pairs_of_chunks_add_up_to_those_of_the_whole_prompt() -> None:
    assert attention_pairs(0, 20) + attention_pairs(20, 15) == attention_pairs(0, 35) == 35 * 36 // 2


def test_memory_left_idle_by_clearing_the_cache_is_empty_again() -> None:
    engine = Engine(make_config())
    engine.submit(make_request("a", 20, 1, (1, 2)), 0.0)
    engine.advance(1.0)
    assert engine.clear_cache() == 2
    engine.submit(make_request("b", 20, 1, (1, 2)), 1.0)
    assert [event.tokens for event in engine.advance(2.0) if event.kind is EventKind.FIRST_TOKEN] == [0]
