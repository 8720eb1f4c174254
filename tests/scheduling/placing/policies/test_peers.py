"""The rules of the policies that look at every instance, each as its source documents it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.tier_load import InTier, TierLoad

GenerationRequest = Callable[..., RouteQuery]
Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]


def test_round_robin_visits_everybody_in_turn_whatever_the_load(
    choose: Choose, load: Load, query: GenerationRequest
) -> None:
    loads = load("a", pending_tokens=10**6), load("b", hit_blocks=9), load("c")

    decisions = [choose("round-robin", *loads, ask=query(sequence=number)) for number in range(6)]

    assert [decision.instance_id for decision in decisions] == ["a", "b", "c"] * 2
    assert [decision.alternative_id for decision in decisions[:3]] == ["b", "c", "a"]
    assert decisions[0].seen_pending_tokens is None


def test_least_loaded_takes_the_fewest_pending_tokens(choose: Choose, load: Load) -> None:
    decision = choose(
        "least-loaded", load("a", pending_tokens=3), load("b", pending_tokens=1), load("c", pending_tokens=2)
    )

    assert (decision.instance_id, decision.alternative_id) == ("b", "c")


def test_least_loaded_breaks_ties_by_requests_in_flight(choose: Choose, load: Load) -> None:
    assert choose("least-loaded", load("a", running_requests=3), load("b", running_requests=2)).instance_id == "b"


def test_min_ttft_weighs_recompute_against_queueing(choose: Choose, load: Load) -> None:
    # given 0.7 + 0.5 s at the hit, 1.0 s where idle
    cached, idle = load("cached", hit_blocks=5, pending_tokens=700), load("idle")

    assert choose("min-ttft", cached, idle).instance_id == "idle"
    assert choose("min-ttft", load("cached", hit_blocks=8, pending_tokens=700), idle).instance_id == "cached"


def test_min_ttft_uses_each_instance_s_own_rate(choose: Choose, load: Load) -> None:
    fast = load("fast", pending_tokens=2000, prefill_tokens_per_s=10_000.0)

    assert choose("min-ttft", fast, load("slow")).instance_id == "fast"


def test_preble_exploits_a_match_of_more_than_half(choose: Choose, load: Load) -> None:
    loads = load("half", hit_blocks=5, window_tokens=1900.0), load("light", window_tokens=1000.0)
    more = load("more", hit_blocks=6, window_tokens=1900.0)

    assert choose("preble", *loads).instance_id == "light"
    decision = choose("preble", *loads, more)
    assert (decision.instance_id, decision.reason) == ("more", Reason.CACHE)


def test_preble_breaks_equal_matches_by_load(choose: Choose, load: Load) -> None:
    loads = load("a", hit_blocks=8, window_tokens=900.0), load("b", hit_blocks=8, window_tokens=800.0), load("c")

    assert choose("preble", *loads).instance_id == "b"


def test_preble_explores_by_load_plus_prefill_plus_eviction(choose: Choose, load: Load) -> None:
    # given 1000 tokens to compute everywhere, and a full cache on the one with the least load
    full = load("full", window_tokens=500.0, cached_blocks=100, kv_capacity_tokens=10_000)
    roomy = load("roomy", window_tokens=1000.0, cached_blocks=10, kv_capacity_tokens=10_000)

    assert choose("preble", full, roomy).instance_id == "roomy"
    assert choose("preble", replace(full, cached_blocks=10), roomy).instance_id == "full"


def test_preble_stops_exploiting_an_instance_far_above_the_least_loaded(choose: Choose, load: Load) -> None:
    hot, light = load("hot", hit_blocks=9, window_tokens=2100.0), load("light", window_tokens=1000.0)

    assert choose("preble", hot, light).instance_id == "light"
    assert choose("preble", replace(hot, window_tokens=1900.0), light).instance_id == "hot"


def test_preble_may_count_what_running_requests_decode(choose: Choose, load: Load) -> None:
    busy, calm = load("busy", window_tokens=900.0, running_requests=10), load("calm", window_tokens=1000.0)

    assert choose("preble", busy, calm).instance_id == "busy"
    assert choose("preble", busy, calm, policy_options={"decode_s_per_token": 0.001}).instance_id == "calm"


def test_dynamo_adds_scaled_prefill_blocks_and_decode_blocks(choose: Choose, load: Load) -> None:
    # given, in blocks of 100 tokens: prefill 8 + decode 10, prefill 5 + decode 5, prefill 2 + decode 9
    loads = (
        load("w1", hit_blocks=2, context_tokens=1000),
        load("w2", hit_blocks=5, context_tokens=500),
        load("w3", hit_blocks=8, context_tokens=900),
    )

    assert choose("dynamo", *loads).instance_id == "w3", "its scale is that of the project's own replay, 32"
    assert choose("dynamo", *loads, policy_options={"prefill_scale": 1.0}).instance_id == "w2"
    assert choose("dynamo", *loads, policy_options={"prefill_scale": 1.0}).alternative_id == "w3"
    assert choose("vllm-kv-aware", *loads).instance_id == "w2", "its prefill counts as its decoding does"


def test_blocks_that_running_requests_share_count_once_where_the_instance_tells(choose: Choose, load: Load) -> None:
    # given two instances with the same requests, of which only the first has them share a prefix
    shared = load("shared", hit_blocks=5, context_tokens=900_000, kv_used_tokens=100_000)
    apart = load("apart", hit_blocks=5, context_tokens=800_000, kv_used_tokens=800_000)

    assert choose("dynamo", shared, apart).instance_id == "shared"
    assert choose("llm-d", shared, apart).instance_id == "shared"


def test_dynamo_counts_active_prefills(choose: Choose, load: Load) -> None:
    assert choose("dynamo", load("a", pending_tokens=600, hit_blocks=5), load("b")).instance_id == "b"


def test_sglang_takes_the_shortest_queue_when_unbalanced(choose: Choose, load: Load) -> None:
    full = load("full", hit_blocks=10, queued_requests=40, running_requests=30)

    decision = choose("sglang", full, load("empty", running_requests=5))

    assert (decision.instance_id, decision.reason) == ("empty", Reason.BALANCE)


@pytest.mark.parametrize(("longest", "shortest"), [(69, 5), (195, 130)])
def test_sglang_is_balanced_unless_both_thresholds_are_passed(
    longest: int, shortest: int, choose: Choose, load: Load
) -> None:
    cached = load("cached", hit_blocks=4, running_requests=longest)

    decision = choose("sglang", cached, load("other", running_requests=shortest))

    assert (decision.instance_id, decision.reason) == ("cached", Reason.CACHE)


def test_sglang_takes_the_smallest_tree_when_the_match_is_poor(choose: Choose, load: Load) -> None:
    poor, small = load("poor", hit_blocks=3, cached_blocks=50), load("small", cached_blocks=10, running_requests=9)

    assert choose("sglang", poor, small).instance_id == "small"
    assert choose("sglang", poor, small, policy_options={"cache_threshold": 0.2}).instance_id == "poor"
    idle = load("idle", cached_blocks=10)
    assert choose("sglang", poor, small, idle).instance_id == "idle", "of equal trees the less loaded"


def test_llm_d_adds_weighted_scores(choose: Choose, load: Load) -> None:
    # given scores 3 * 0.5 + 2 * 0 + 2 * 1 = 3.5 against 0 + 2 * 1 + 2 * 0.8 = 3.6
    cached = load("cached", hit_blocks=5, queued_requests=10)
    idle = load("idle", queued_requests=2, context_tokens=200_000)

    assert choose("llm-d", cached, idle).instance_id == "idle"
    assert choose("llm-d", cached, idle, policy_options={"prefix_weight": 4.0}).instance_id == "cached"


def test_llm_d_latency_stays_with_a_long_match_until_it_costs_too_much(choose: Choose, load: Load) -> None:
    # given a match of 90 % whose instance has 4 s to do, and an idle one: 0.9 s of prefill more
    cached, idle = load("cached", hit_blocks=9, pending_tokens=4000), load("idle")

    assert choose("llm-d-latency", cached, idle).instance_id == "cached"
    assert choose("llm-d-latency", replace(cached, pending_tokens=6000), idle).instance_id == "idle"
    assert choose("llm-d-latency", replace(cached, hit_blocks=7), idle).instance_id == "idle", "no long match"


def test_llm_d_latency_leaves_a_match_for_the_slo_unless_it_is_nearly_the_whole_prompt(
    choose: Choose, load: Load
) -> None:
    # given 5.5 s of work before the match, and an SLO of 5 s
    whole, idle = load("cached", hit_blocks=10, pending_tokens=5500), load("idle")

    assert choose("llm-d-latency", whole, idle).instance_id == "cached"
    assert choose("llm-d-latency", replace(whole, hit_blocks=9), idle).instance_id == "idle"
    assert choose("llm-d-latency", replace(whole, pending_tokens=6100), idle).instance_id == "idle", "5.1 s later"


def test_llm_d_latency_takes_the_most_headroom_or_the_least(choose: Choose, load: Load) -> None:
    loads = load("busy", pending_tokens=3000), load("late", pending_tokens=9000), load("calm", pending_tokens=1000)

    assert choose("llm-d-latency", *loads).instance_id == "calm"
    assert choose("llm-d-latency", *loads, policy_options={"headroom": "least"}).instance_id == "busy"


def test_llm_d_latency_prefers_an_idle_instance_where_all_are_late(choose: Choose, load: Load) -> None:
    busy, idle = load("busy", pending_tokens=7000, queued_requests=1), load("idle", pending_tokens=8000)

    assert choose("llm-d-latency", busy, idle).instance_id == "idle"


def test_llm_d_scales_queues_between_the_shortest_and_the_longest(choose: Choose, load: Load) -> None:
    # given queues 4, 5 and 6: the middle one scores half of 2; its hit of 40 % scores 1.2
    loads = (
        load("short", queued_requests=4),
        load("mid", queued_requests=5, hit_blocks=4),
        load("long", queued_requests=6),
    )

    assert choose("llm-d", *loads).instance_id == "mid"


def test_llm_d_ignores_queues_that_are_all_the_same(choose: Choose, load: Load) -> None:
    loads = load("a", queued_requests=7, context_tokens=500_000), load("b", queued_requests=7)

    assert choose("llm-d", *loads).instance_id == "b"


def in_tiers(hit_blocks: int, tier: str, blocks: int) -> dict[str, Any]:
    """The figures of a load whose hit has so many blocks, the last of them in a tier."""
    return {"hit_blocks": hit_blocks, "tiers": TierLoad(blocks, 0.5, 0.5, None, (InTier(tier, blocks, 0),))}


@pytest.mark.parametrize(("tier", "worth"), [("host", 6), ("disk", 2), ("pool", 4)])
def test_dynamo_counts_blocks_in_tiers_by_constants(choose: Choose, load: Load, tier: str, worth: int) -> None:
    tiered = load("tiered", **in_tiers(8, tier, 8))

    assert choose("dynamo", tiered, load("less", hit_blocks=worth - 1)).instance_id == "tiered"
    assert choose("dynamo", tiered, load("more", hit_blocks=worth + 1)).instance_id == "more"
    assert choose("vllm-kv-aware", tiered, load("more", hit_blocks=worth + 1)).instance_id == "tiered"


def test_llm_d_counts_blocks_in_tiers_by_constants(choose: Choose, load: Load) -> None:
    # given a device's 2 blocks and 8 in host memory, 2 + 8 * 0.8 = 8.4
    tiered = load("tiered", **in_tiers(10, "host", 8))

    assert choose("llm-d", tiered, load("less", hit_blocks=8)).instance_id == "tiered"
    assert choose("llm-d", tiered, load("more", hit_blocks=9)).instance_id == "more"
    by_price = choose("llm-d", tiered, load("more", hit_blocks=8), policy_options={"host_credit": 0.7})
    assert by_price.instance_id == "more"


def test_llm_d_pulls_from_a_fixed_number_of_tokens_on(choose: Choose, load: Load) -> None:
    # given an instance that is preferred for its queue, and another with 500 tokens more of the prompt
    loads = load("busy", hit_blocks=8, queued_requests=9, context_tokens=800_000), load("idle", hit_blocks=3)

    sources = [choose("llm-d", *loads, policy_options={"pull_from_tokens": least}).source for least in (500, 501)]

    assert (choose("llm-d", *loads).instance_id, choose("llm-d", *loads).source) == ("idle", None)
    assert sources == ["busy", None]
