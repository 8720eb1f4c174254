from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.prompts.blocks import chain_of_trace
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.hotness import MIN_KEY_BLOCKS, HotnessRule, HotnessTree, HotnessWindow

RULE = HotnessRule(min_requests=10)
TOOL_AND_AGENT = Path(os.environ.get("DUALMAP_TRACES", "traces")) / "toolagent_first1000.jsonl"


def chain(*hashes: int) -> Chain:
    return Chain(hashes, 128, 128 * len(hashes))


def window(*heads: tuple[int, ...], max_requests: int = 1000) -> HotnessWindow:
    built = HotnessWindow(60_000, max_requests, 64)
    for at_ms, head in enumerate(heads):
        built.add(at_ms, head)
    return built


def shared(count: int, of: int = 100) -> list[tuple[int, ...]]:
    """``of`` requests, of which ``count`` start with prefix 1."""
    return [(1, 1000 + i) for i in range(count)] + [(2000 + i,) for i in range(of - count)]


def test_a_key_is_the_first_prefix_that_is_not_hot() -> None:
    tree = HotnessTree({1: 1, 2: 2, 3: 3})

    chains = [chain(*hashes) for hashes in ((1, 6, 7, 8), (1, 2, 7, 8), (1, 2, 3, 8))]
    assert [tree.key_blocks(one, 64) for one in chains] == [2, 3, 4]
    assert tree.key(chain(1, 2, 3, 8, 9), 64) == 8


def test_a_key_has_two_blocks_at_least_where_the_prompt_has() -> None:
    assert HotnessTree().key_blocks(chain(5, 6, 7), 64) == 2
    assert HotnessTree().key_blocks(chain(5), 64) == 1
    assert HotnessTree().key_blocks(chain(5, 6, 7), 1) == 1


def test_a_key_ends_with_the_chain_and_with_the_longest_key() -> None:
    tree = HotnessTree({1: 1, 2: 2, 3: 3})

    assert tree.key_blocks(chain(1), 64) == 1
    assert tree.key_blocks(chain(1, 2, 3), 64) == 3
    assert tree.key_blocks(chain(1, 2, 3, 4), 2) == 2


def test_keys_of_short_blocks_are_as_long_as_those_of_blocks_of_text() -> None:
    chain = Chain(tuple(range(1, 12)), 16, 180, tail_hash=99, key_stride=4)
    assert chain.key_hashes == (4, 8)
    assert [HotnessTree(dict.fromkeys(hot, 1)).key(chain, 64) for hot in ((), (4,), (4, 8))] == [8, 8, 99]
    assert HotnessTree({4: 1, 8: 2}).key_blocks(chain, 2) == 2
    whole = Chain(tuple(range(1, 9)), 16, 128, key_stride=4)
    assert HotnessTree({4: 1, 8: 2}).key(whole, 64) == 8
    without_tail = Chain(tuple(range(1, 12)), 16, 176, key_stride=4)
    assert HotnessTree({4: 1, 8: 2}).key(without_tail, 64) == 11
    shorter_than_one = Chain((1, 2), 16, 40, tail_hash=99, key_stride=4)
    assert shorter_than_one.key_hashes == (2,)
    assert HotnessTree({2: 1}).key(shorter_than_one, 64) == 99


def test_requests_that_add_less_than_a_block_to_a_hot_prefix_spread_by_their_tails() -> None:
    tree = HotnessTree({1: 1, 2: 2})
    short = Chain((1, 2), 128, 300, tail_hash=99)

    assert (tree.key_blocks(short, 64), tree.key(short, 64)) == (3, 99)
    assert (tree.key_blocks(short, 2), tree.key(short, 2)) == (2, 2)
    assert HotnessTree({1: 1}).key(short, 64) == 2


def test_a_prefix_is_hot_above_two_nths_of_the_traffic() -> None:
    # given 8 instances: hot above 25 %
    assert window(*shared(25)).grow(HotnessTree(), 8, RULE).hot == {}
    assert window(*shared(26)).grow(HotnessTree(), 8, RULE).hot == {1: 1}


def test_a_hot_prefix_stays_hot_until_it_falls_under_one_nth() -> None:
    # given 8 instances: cold below 12.5 %
    hot = HotnessTree({1: 1})

    assert window(*shared(13)).grow(hot, 8, RULE) is hot
    assert window(*shared(12)).grow(hot, 8, RULE).hot == {}


def test_a_share_that_swings_within_the_band_never_changes_the_tree() -> None:
    cold, hot = HotnessTree(), HotnessTree({1: 1})

    for share in (13, 24, 14, 25, 18):
        traffic = window(*shared(share))
        assert traffic.grow(cold, 8, RULE) is cold
        assert traffic.grow(hot, 8, RULE) is hot


def test_heat_reaches_as_deep_as_the_shared_prefix() -> None:
    heads = [(1, 2, 3, 4, 100 + i) for i in range(60)] + [(1, 900 + i) for i in range(40)]

    tree = window(*heads).grow(HotnessTree(), 8, RULE)

    assert tree.hot == {1: 1, 2: 2, 3: 3, 4: 4}
    assert tree.key_blocks(chain(1, 2, 3, 4, 5, 6), 64) == 5


def test_more_instances_lower_the_bar() -> None:
    traffic = window(*shared(20))

    assert traffic.grow(HotnessTree(), 8, RULE).hot == {}
    assert traffic.grow(HotnessTree(), 16, RULE).hot == {1: 1}


def test_a_few_requests_prove_nothing() -> None:
    tree = HotnessTree({7: 1})

    assert window(*[(1, 2)] * 9).grow(tree, 8, RULE) is tree


def test_old_requests_leave_by_age_and_by_number() -> None:
    aged = window((1,), (1,), (1,))
    aged.expire(60_001)

    assert (len(aged), aged.count(1)) == (1, 1)

    full = window((1,), (2,), (3,), max_requests=2)

    assert (len(full), full.count(1), full.count(3)) == (2, 0, 1)


def test_the_window_holds_a_number_of_requests_by_the_number_of_instances() -> None:
    # given 1,000 requests of one prefix, then 64 of others
    traffic = window(*[(1, 2)] * 1000, *[(100 + number,) for number in range(64)], max_requests=5000)
    rule = HotnessRule(min_requests=10, requests_per_instance=16)

    assert traffic.grow(HotnessTree({1: 1}), 4, rule).hot == {}, "a hot spot that moved is forgotten"
    assert len(traffic) == 64


def test_heads_are_cut_at_the_longest_key() -> None:
    short = HotnessWindow(60_000, 100, 2)
    short.add(0, (1, 2, 3))

    assert [short.count(prefix) for prefix in (1, 2, 3)] == [1, 1, 0]


def test_the_same_traffic_leaves_the_tree_itself() -> None:
    traffic = window(*shared(60))
    tree = traffic.grow(HotnessTree(), 8, RULE)

    assert traffic.grow(tree, 8, RULE) is tree


Requests = list[tuple[list[int], int]]
"""Hash ids and prompt tokens of each."""

paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=60)


def heads_of(some: list[list[int]]) -> list[tuple[int, ...]]:
    """Paths in a small tree as prefix hashes: a hash names the whole path to it."""
    return [tuple(int("1" + "".join(map(str, path[: k + 1]))) for k in range(len(path))) for path in some]


@given(paths, paths, st.integers(1, 12))
def test_the_indexed_window_follows_the_plain_rule(before: list[list[int]], now: list[list[int]], n: int) -> None:
    rule = HotnessRule(min_requests=1)
    counted = HotnessWindow(10**6, len(now), 64)
    for head in heads_of(before):
        counted.add(0, head)
    tree = counted.grow(HotnessTree(), n, rule)

    for head in heads_of(now):
        counted.add(1, head)

    counts = Counter(prefix for head in heads_of(now) for prefix in head)
    depths = {prefix: depth for head in heads_of(now) for depth, prefix in enumerate(head, 1)}
    total = len(now)
    expected = {
        prefix: depths[prefix]
        for prefix, count in counts.items()
        if count > 2 / n * total or (prefix in tree.hot and count >= 1 / n * total)
    }
    assert counted.grow(tree, n, rule).hot == expected


@given(paths, st.integers(2, 12))
def test_a_hot_prefix_ends_before_a_key_that_is_longer_than_an_ordinary_one(sent: list[list[int]], n: int) -> None:
    counted = HotnessWindow(10**6, len(sent), 64)
    for head in heads_of(sent):
        counted.add(0, head)
    tree = counted.grow(HotnessTree(), n, HotnessRule(min_requests=1))

    for hashes in heads_of(sent):
        asked = Chain(hashes, 128, 128 * len(hashes) + 1, tail_hash=99)
        key_blocks = tree.key_blocks(asked, 64)
        assert tree.hot_tokens(asked) == (128 * (key_blocks - 1) if key_blocks > MIN_KEY_BLOCKS else 0)


def test_a_hot_prefix_has_no_more_tokens_than_the_prompt() -> None:
    tree, whole = HotnessTree({4: 1, 8: 2}), Chain(tuple(range(1, 9)), 16, 128, key_stride=4)
    assert tree.hot_tokens(whole) == 128
    assert tree.hot_tokens(Chain((4, 8), 64, 120)) == 120
    assert tree.hot_tokens(Chain((4,), 64, 64)) == 0


@given(paths, paths, st.integers(1, 12))
def test_every_hot_prefix_has_a_hot_parent(before: list[list[int]], now: list[list[int]], n: int) -> None:
    counted = HotnessWindow(10**6, max(len(before), len(now)), 64)
    tree = HotnessTree()
    for some in (before, now):
        for head in heads_of(some):
            counted.add(0, head)
        tree = counted.grow(tree, n, HotnessRule(min_requests=1))

    assert all(prefix // 10 in tree.hot for prefix, depth in tree.hot.items() if depth > 1)


def tool_and_agent_like() -> Requests:
    """Requests of a shape like the trace's first 1000: (hash ids, tokens), two tool prompts of 12 and 5 blocks."""
    random_source = random.Random(7)
    fresh = iter(range(1000, 10**6))
    tools = [list(range(46, 58)), list(range(74, 79)), [0]]
    drawn = random_source.choices(tools, weights=[36, 15, 49], k=1000)
    return [([*tool, next(fresh), next(fresh)], 512 * (len(tool) + 2)) for tool in drawn]


def recorded() -> Requests:
    records = [json.loads(line) for line in TOOL_AND_AGENT.read_text().splitlines()]
    return [(record["hash_ids"], record["input_length"]) for record in records]


needs_trace = pytest.mark.skipif(
    not TOOL_AND_AGENT.exists(), reason="set DUALMAP_TRACES to the folder that holds toolagent_first1000.jsonl"
)


@pytest.mark.parametrize(
    "requests",
    [pytest.param(tool_and_agent_like, id="generated"), pytest.param(recorded, id="recorded", marks=needs_trace)],
)
def test_popular_tool_prompts_are_keyed_one_block_past_their_end(
    requests: Callable[[], list[tuple[list[int], int]]],
) -> None:
    chains = [chain_of_trace(ids, tokens, seed=1) for ids, tokens in requests()]
    first_tool = chain_of_trace([*range(46, 58), -1, -2], 14 * 512, seed=1)
    second_tool = chain_of_trace([*range(74, 79), -1, -2], 7 * 512, seed=1)
    conversation = chain_of_trace([0, -1, -2], 3 * 512, seed=1)

    def tree_with(ready_instances: int) -> HotnessTree:
        traffic, tree = HotnessWindow(10**9, 4096, 64), HotnessTree()
        for at_ms, each in enumerate(chains):
            traffic.add(at_ms, each.hashes)
            if at_ms % 50 == 49:
                tree = traffic.grow(tree, ready_instances, HotnessRule())
        return tree

    assert tree_with(8).key_blocks(first_tool, 64) == 13
    assert tree_with(8).key_blocks(conversation, 64) == 2
    # 15 % of the traffic heats up only where 2/n is under it: with 16 instances
    assert tree_with(16).key_blocks(second_tool, 64) == 6
