from __future__ import annotations

from collections.abc import Callable

import pytest

from dualmap.scheduling.state.instance import InstanceLoad

Load = Callable[..., InstanceLoad]


@pytest.mark.parametrize(("passed_over_tokens", "overtaken_tokens"), [(0, 100), (250, 350), (400, 500), (900, 500)])
def test_what_a_plan_passed_over_is_overtaken_as_far_as_it_still_waits(
    load: Load, passed_over_tokens: int, overtaken_tokens: int
) -> None:
    # given 400 tokens of requests that are held and not deferred
    figures = {"pending_tokens": 1000, "dispatched_tokens": 500, "deferred_tokens": 100}

    assert load("a", **figures, passed_over_tokens=passed_over_tokens).overtaken_tokens == overtaken_tokens


@pytest.mark.parametrize(
    ("context_tokens", "demand", "usage"), [(0, 0.0, 0.0), (250_000, 0.25, 0.25), (1_500_000, 1.5, 1.0)]
)
def test_kv_memory_can_be_overcommitted_but_not_more_than_used_up(
    load: Load, context_tokens: int, demand: float, usage: float
) -> None:
    seen = load("a", context_tokens=context_tokens)

    assert (seen.kv_demand, seen.kv_usage) == (demand, usage)


def test_an_instance_without_kv_memory_of_its_own_is_no_division_by_zero(load: Load) -> None:
    assert load("a", kv_capacity_tokens=0, context_tokens=5).kv_usage == 1.0
