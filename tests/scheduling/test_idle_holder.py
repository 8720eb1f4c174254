"""An idle holder is what the policy would choose, and there is one only where nothing is left to weigh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.chain import Chain
from scheduling.decision import Decision, Horizon, Reason, RouteQuery
from scheduling.idle_holder import idle_holder, idle_holder_cost
from scheduling.instance import InstanceLoad, InstanceState
from scheduling.placement_cost import PlacementCost
from scheduling.policies import build_policy
from scheduling.settings import POLICIES, SchedulingSettings

Load = Callable[..., InstanceLoad]
CHAIN = Chain(tuple(range(1, 11)), 100, 1000)
COST = PlacementCost(recompute_weight=3.0, eviction_weight=4.0, kv_weight_s=4.0)
WIDE = SchedulingSettings(policy="dualmap-wide")

idle_or_busy = st.one_of(st.just(0), st.integers(0, 20_000))
random_loads = st.builds(
    InstanceLoad,
    instance_id=st.just(""),
    state=st.sampled_from((InstanceState.READY, InstanceState.READY, InstanceState.DRAINING)),
    pending_tokens=idle_or_busy,
    context_tokens=st.sampled_from((0, 0, 10_000, 100_000, 900_000)),
    prefill_tokens_per_s=st.sampled_from((1000.0, 1000.0, 1010.0, 4000.0)),
    hit_blocks=st.integers(0, 10),
    cached_blocks=st.sampled_from((0, 5000, 20_000)),
    ttft_weights=st.sampled_from(((0.03, 1.0, 1.0, 0.0, 0.0), (0.2, 0.9, 1.4, 0.1, 2.0))),
)


def among(*loads: InstanceLoad, chain: Chain = CHAIN, slo_s: float = 5.0, holder_blocks: int = 0) -> Decision | None:
    return idle_holder(COST, chain, slo_s, {load.instance_id: load for load in loads}, holder_blocks)


def test_of_two_idle_ones_the_holder_is_taken(load: Load) -> None:
    decision = among(load("a"), load("b", hit_blocks=4))

    assert decision is not None
    assert (decision.instance_id, decision.uncached_tokens, decision.reason) == ("b", 600, Reason.CACHE)
    assert (decision.alternative_id, decision.alternative_uncached_tokens) == ("a", 1000)
    assert decision.expected_ttft_s == pytest.approx(0.63)


def test_of_two_that_are_alike_the_first_is_taken(load: Load) -> None:
    decision = among(load("b"), load("a"))

    assert decision is not None
    assert (decision.instance_id, decision.reason) == ("b", Reason.COST)


def test_there_is_none_where_something_is_left_to_weigh(load: Load) -> None:
    assert among(load("a"), load("b", hit_blocks=4, pending_tokens=1)) is None, "the holder has something to do"
    assert among(load("a", hit_blocks=4), holder_blocks=5) is None, "somebody else holds more"
    assert among(load("a", hit_blocks=1, context_tokens=900_000), load("b")) is None, "the other has more KV memory"
    assert among(load("a"), load("b"), slo_s=1.0) is None, "it would be late"
    assert among(load("a", state=InstanceState.DRAINING)) is None
    assert among() is None


def test_only_policies_that_weigh_so_have_idle_holders() -> None:
    with_cost = [name for name in POLICIES if idle_holder_cost(SchedulingSettings(policy=name)) is not None]

    assert with_cost == ["dualmap-wide"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    loads=st.lists(random_loads, min_size=1, max_size=2),
    blocks=st.integers(1, 30),
    slo_s=st.sampled_from((0.5, 1.5, 30.0)),
    holder_blocks=st.integers(0, 5),
)
def test_it_is_what_the_policy_says_of_the_same_loads(
    loads: list[InstanceLoad], blocks: int, slo_s: float, holder_blocks: int
) -> None:
    chain = Chain(tuple(range(1, blocks + 1)), 100, 100 * blocks)
    for name, each in zip("ab", loads, strict=False):
        each.instance_id = name
        each.hit_blocks = min(each.hit_blocks, blocks)
    seen = {each.instance_id: each for each in loads}
    cost = idle_holder_cost(WIDE)
    assert cost is not None

    decision = idle_holder(cost, chain, slo_s, seen, holder_blocks)

    if decision is not None:
        query = RouteQuery(chain, slo_s, pair=tuple(seen))
        beyond = Horizon(("c",), holder_blocks, (("d", 0.0),))
        assert build_policy(WIDE).choose_or_look(query, seen, beyond) == decision
