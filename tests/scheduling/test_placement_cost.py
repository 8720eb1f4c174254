"""A recompute weighs more where it evicts what others would have found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduling.chain import Chain
from scheduling.instance import InstanceLoad
from scheduling.placement_cost import PlacementCost

Load = Callable[..., InstanceLoad]
CHAIN = Chain(tuple(range(10)), 100, 1000)
COST = PlacementCost(recompute_weight=3.0, eviction_weight=4.0, kv_weight_s=2.0)
FULL = {"kv_capacity_tokens": 10_000, "cached_blocks": 100}


def test_with_room_in_the_cache_a_recompute_weighs_several_times_its_own_seconds(load: Load) -> None:
    assert COST.recompute_s(load("a"), CHAIN, 0) == 3.0
    assert COST.recompute_s(load("a", context_tokens=5000, kv_capacity_tokens=10_000), CHAIN, 4) == pytest.approx(1.8)


def test_in_a_full_cache_it_weighs_more_once_running_requests_leave_little_of_it(load: Load) -> None:
    def weighed_s(context_tokens: int, cached_blocks: int = 100) -> float:
        held = {"kv_capacity_tokens": 10_000, "cached_blocks": cached_blocks, "context_tokens": context_tokens}
        return COST.recompute_s(load("a", **held), CHAIN, 0)

    assert weighed_s(7000) == pytest.approx(3.0), "what is evicted is old"
    assert weighed_s(9000) == pytest.approx(9.0)
    assert weighed_s(11_000) == weighed_s(30_000) == pytest.approx(15.0)
    assert weighed_s(11_000, cached_blocks=50) == pytest.approx(9.0), "half of it is taken from nobody"


def test_context_beyond_the_memory_still_tells_more_from_less(load: Load) -> None:
    twice = load("a", **FULL, context_tokens=20_000)

    assert (twice.kv_usage, twice.kv_demand) == (1.0, 2.0)
    assert COST.least_s(twice, CHAIN, 10) == COST.recompute_s(twice, CHAIN, 10) + 2.0 * 2.0
