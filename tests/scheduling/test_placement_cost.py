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


def test_in_a_full_cache_it_weighs_more_the_more_running_requests_keep(load: Load) -> None:
    assert COST.recompute_s(load("a", **FULL), CHAIN, 0) == 3.0, "nobody is running: what is evicted is old"
    assert COST.recompute_s(load("a", **FULL, context_tokens=5000), CHAIN, 0) == 9.0
    half = load("a", kv_capacity_tokens=10_000, cached_blocks=50, context_tokens=5000)
    assert COST.recompute_s(half, CHAIN, 0) == 6.0


def test_context_beyond_the_memory_still_tells_more_from_less(load: Load) -> None:
    twice = load("a", **FULL, context_tokens=20_000)

    assert (twice.kv_usage, twice.kv_demand) == (1.0, 2.0)
    assert COST.least_s(twice, CHAIN, 10) == COST.recompute_s(twice, CHAIN, 10) + 2.0 * 2.0
