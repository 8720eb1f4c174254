from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.hotness import MAX_KEY_BLOCKS
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView

GenerationRequest = Callable[..., RouteQuery]
Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]
Build = Callable[..., Policy]
View = Callable[..., ClusterView]

PAIR_POLICIES = [
    "dualmap",
    "dualmap-no-rebalance",
    "dualmap-cache-affinity",
    "dualmap-least-loaded",
    "dualmap-min-ttft",
    "cache-affinity",
]
IDS = [f"i{number}" for number in range(8)]


@pytest.mark.parametrize("name", PAIR_POLICIES)
def test_requests_that_share_a_hash_key_see_the_same_two_instances(
    name: str, policy: Build, query: GenerationRequest, view: View
) -> None:
    cluster = view(IDS)

    pairs = {policy(name).candidates(query(1, blocks=length), cluster) for length in range(2, 30)}

    assert len(pairs) == 1
    assert len(set(pairs.pop())) == 2


def test_requests_of_a_hot_prefix_spread(policy: Build, view: View) -> None:
    # given 100 requests that share their first two blocks and differ in the third
    asks = [RouteQuery(Chain((1, 2, 10**6 + number), 100, 300), slo_s=5.0) for number in range(100)]

    together = Counter(policy("dualmap").candidates(ask, view(IDS)) for ask in asks)
    spread = Counter(policy("dualmap").candidates(ask, view(IDS, hot={1: 1, 2: 2})) for ask in asks)

    assert len(together) == 1
    assert len(spread) > 20


def test_requests_that_share_their_first_block_alone_need_not_be_hot_to_spread(policy: Build, view: View) -> None:
    asks = [with_own_second_block(number) for number in range(100)]

    assert len({policy("dualmap").candidates(ask, view(IDS)) for ask in asks}) > 20


def with_own_second_block(number: int) -> RouteQuery:
    return RouteQuery(Chain((1, 10**6 + number), 100, 200), slo_s=5.0)


def test_the_longest_key_bounds_the_spreading(policy: Build, view: View) -> None:
    shared = tuple(range(1, MAX_KEY_BLOCKS + 1))
    hot = view(IDS, hot={block: block for block in shared})

    def candidates(common: int) -> int:
        chains = (Chain((*shared[:common], 10**6 + number), 100, 100 * (common + 1)) for number in range(20))
        return len({policy("dualmap").candidates(RouteQuery(chain, slo_s=5.0), hot) for chain in chains})

    assert candidates(MAX_KEY_BLOCKS) == 1
    assert candidates(MAX_KEY_BLOCKS - 1) > 5


def test_a_failed_candidate_leaves_the_other_one(
    policy: Build, query: GenerationRequest, view: View, load: Load, choose: Choose
) -> None:
    cluster, dualmap = view(IDS), policy("dualmap")
    first, second = dualmap.candidates(query(), cluster)

    retry = query(excluded=frozenset({first}), pair=(first, second))

    assert dualmap.candidates(retry, cluster) == (second,)
    decision = choose("dualmap", load(second), ask=retry)
    assert (decision.instance_id, decision.reason, decision.alternative_id) == (second, Reason.ONLY_ONE, None)


def test_a_request_that_failed_on_its_whole_pair_goes_beyond_it(
    policy: Build, query: GenerationRequest, view: View, load: Load, choose: Choose
) -> None:
    cluster, dualmap = view(IDS), policy("dualmap")
    pair = dualmap.candidates(query(), cluster)
    retry = query(excluded=frozenset(pair), pair=pair)

    beyond = dualmap.candidates(retry, cluster)
    decision = choose("dualmap", *(load(name) for name in beyond), ask=retry)

    assert len(beyond) == 2
    assert not set(beyond) & set(pair)
    assert decision.reason is Reason.BEYOND_PAIR
    assert {decision.instance_id, decision.alternative_id} == set(beyond)


def test_a_request_that_failed_elsewhere_twice_is_still_within_its_pair(
    choose: Choose, query: GenerationRequest, load: Load
) -> None:
    retry = query(excluded=frozenset({"c", "d"}), pair=("a", "b"))

    assert choose("dualmap", load("a"), load("b", pending_tokens=9), ask=retry).reason is Reason.BALANCE


@pytest.mark.parametrize("name", PAIR_POLICIES)
def test_nobody_left_is_an_error_that_says_so(name: str, policy: Build, query: GenerationRequest, view: View) -> None:
    with pytest.raises(NoInstanceError, match="no instance is ready"):
        policy(name).candidates(query(), view([]))
    with pytest.raises(NoInstanceError, match="every ready instance is excluded"):
        policy(name).candidates(query(excluded=frozenset({"a", "b"})), view(["a", "b"]))


@pytest.mark.parametrize("name", PAIR_POLICIES)
def test_the_other_candidate_is_the_alternative_with_what_it_would_compute(
    name: str, choose: Choose, load: Load
) -> None:
    decision = choose(name, load("a", hit_blocks=4), load("b", hit_blocks=1))

    hits = {"a": 4, "b": 1}
    other = {"a": "b", "b": "a"}[decision.instance_id]
    assert decision.alternative_id == other
    assert decision.uncached_tokens == 1000 - 100 * hits[decision.instance_id]
    assert decision.alternative_uncached_tokens == 1000 - 100 * hits[other]


def test_only_the_full_method_rebalances(policy: Build) -> None:
    assert [name for name in PAIR_POLICIES if policy(name).rebalances] == ["dualmap"]
