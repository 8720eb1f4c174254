"""A request whose prompt another engine's cache has: its mover says how much of it came, and the rest is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.prompts.cache_groups import CacheGroup, GroupKind
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind
from dualmap.simulation.engine.kv_tiers import KvTier
from dualmap.simulation.engine.step_time import StepCosts

# 10 ms a step, 1 ms a token; blocks of 10 tokens.
COSTS = StepCosts(
    overhead_s=0.010, weights_s=0.0, token_s=0.001, attention_pair_s=0.0, sequence_s=0.0, context_token_s=0.0
)
CONFIG = EngineConfig(COSTS, 1000, block_tokens=10, max_num_batched_tokens=1000, max_num_seqs=4)
PROMPT = tuple(range(10))


def request(name: str, *, most: int | None = None, pulls: bool = True) -> EngineRequest:
    return EngineRequest(name, 105, 1, PROMPT, max_load_tokens=most, pulls=pulls)


def seen(events: list[Event], kind: EventKind) -> dict[str, tuple[float, int]]:
    return {event.request_id: (round(event.time_s, 6), event.tokens) for event in events if event.kind is kind}


def pulling(config: EngineConfig = CONFIG, *, most: int | None = None) -> Engine:
    """An engine whose only request has been pulling since 1.0."""
    engine = Engine(config)
    engine.submit(request("a", most=most), 1.0)
    assert set(seen(engine.advance(1.0), EventKind.PULLING)) == {"a"}
    return engine


def test_what_came_is_a_hit_and_the_rest_is_computed() -> None:
    engine = pulling()
    assert engine.wanted_blocks("a") == PROMPT
    assert engine.statistics().used_blocks == 11
    assert engine.receive_pulled("a", 7, 0.4, 1.5)
    events = engine.advance(9.0)

    assert seen(events, EventKind.SCHEDULED) == {"a": (1.5, 70)}
    assert seen(events, EventKind.FIRST_TOKEN) == {"a": (1.545, 70)}  # 35 tokens in one step
    counts = engine.statistics().pulls
    assert (counts.loads, counts.tokens, counts.busy_s) == (1, 70, 0.4)
    assert engine.serve(PROMPT) == 10, "what was pulled and what was computed can be pulled on"


def test_a_pull_that_brings_nothing_leaves_all_to_be_computed_once() -> None:
    engine = pulling()
    assert engine.receive_pulled("a", 0, 0.0, 2.0)
    assert not engine.receive_pulled("a", 10, 0.0, 2.0), "it does not pull any more"
    events = engine.advance(9.0)

    assert seen(events, EventKind.FIRST_TOKEN) == {"a": (2.115, 0)}
    assert engine.statistics().pulls.loads == 0


def test_a_pull_holds_up_no_other_request() -> None:
    engine = pulling()
    engine.submit(EngineRequest("short", 10, 1), 1.1)
    assert seen(engine.advance(1.2), EventKind.FIRST_TOKEN) == {"short": (1.12, 0)}


def test_a_prompt_that_is_here_already_is_not_pulled() -> None:
    engine = pulling()
    engine.receive_pulled("a", 10, 0.1, 1.1)
    engine.advance(3.0)
    engine.submit(request("again"), 3.0)
    events = engine.advance(9.0)

    assert seen(events, EventKind.PULLING) == {}
    assert seen(events, EventKind.FIRST_TOKEN) == {"again": (3.015, 100)}


def test_a_limit_holds_for_pulls_too() -> None:
    assert pulling(most=35).wanted_blocks("a") == PROMPT[:3]
    engine = Engine(CONFIG)
    engine.submit(request("a", most=0), 1.0)
    assert seen(engine.advance(2.0), EventKind.FIRST_TOKEN) == {"a": (1.115, 0)}


def test_a_tier_is_loaded_while_the_rest_is_pulled_and_the_slower_of_both_counts() -> None:
    # given four blocks of the prompt in a tier, whose load takes a second, and an empty device
    slow = KvTier(Tier.HOST, 1000, bytes_per_s=CONFIG.transfer.bytes_per_token * 40, start_s=0.0)
    config = replace(CONFIG, tiers=(slow,))
    engines = [Engine(config) for _ in range(2)]
    for engine in engines:
        engine.submit(EngineRequest("before", 41, 1, PROMPT[:4]), 0.0)
        engine.advance(0.9)
        engine.clear_cache()
        engine.submit(request("a"), 1.0)
        engine.advance(1.0)
        assert engine.wanted_blocks("a") == PROMPT[4:]
    # when the pull ends before the load, or after it
    assert engines[0].receive_pulled("a", 6, 0.2, 1.2)
    assert engines[1].receive_pulled("a", 6, 0.2, 2.5)
    # then five tokens are left to compute, once both are there
    assert [seen(engine.advance(9.0), EventKind.FIRST_TOKEN)["a"] for engine in engines] == [(2.015, 100), (2.515, 100)]


@pytest.mark.parametrize("receives", [False, True])
def test_an_aborted_pull_gives_back_all_blocks(receives: bool) -> None:
    engine = pulling()
    assert engine.abort("a", 1.2)
    if receives:
        assert not engine.receive_pulled("a", 10, 0.1, 1.3)

    assert engine.statistics().used_blocks == 0
    assert engine.wanted_blocks("a") == ()


def test_a_preempted_request_that_pulled_is_computed_again() -> None:
    # given memory for 14 blocks, of which a request that pulled and decodes has 11, and an older one
    engine = Engine(replace(CONFIG, kv_capacity_tokens=140))
    engine.submit(EngineRequest("older", 10, 100), 0.9)
    engine.submit(replace(request("a"), output_tokens=20), 1.0)
    engine.advance(1.05)
    engine.receive_pulled("a", 10, 0.1, 1.1)
    events = engine.advance(99.0)
    # then it is preempted, and pulls no second time
    assert set(seen(events, EventKind.PREEMPTED)) == {"a"}
    assert seen(events, EventKind.PULLING) == {}
    assert set(seen(events, EventKind.FINISHED)) == {"older", "a"}


def test_a_hybrid_model_neither_pulls_nor_serves() -> None:
    groups = (CacheGroup(GroupKind.WINDOW, 10, window_tokens=20),)
    engine = Engine(replace(CONFIG, cache_groups=groups))
    engine.submit(request("a"), 1.0)
    events = engine.advance(2.0)

    assert seen(events, EventKind.PULLING) == {}
    assert seen(events, EventKind.FIRST_TOKEN) == {"a": (1.115, 0)}
    assert engine.serve(PROMPT) == 0


def test_an_engine_serves_what_its_tiers_have_and_counts_it_as_used() -> None:
    engine = Engine(replace(CONFIG, kv_capacity_tokens=200, tiers=(KvTier(Tier.HOST, 200),)))
    for number, prompt in enumerate((PROMPT, tuple(range(50, 58)))):
        engine.submit(EngineRequest(f"{number}", 10 * len(prompt) + 1, 1, prompt), float(number))
        engine.advance(number + 0.9)
    engine.clear_cache()
    assert engine.serve((*PROMPT[:6], 99)) == 6
    # when a third prompt needs the memory of the tier, what was served is kept longer than what was not
    engine.submit(EngineRequest("third", 61, 1, tuple(range(80, 86))), 3.0)
    engine.advance(9.0)
    engine.clear_cache()
    assert engine.serve(PROMPT) == 6
