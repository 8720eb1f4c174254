"""Who leaves: the one that holds little, runs little, and has little that others do not."""

from __future__ import annotations

from dualmap.scheduling.scaling.leaving import plan_leaving
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState


def load(name: str, **figures: int) -> InstanceLoad:
    return InstanceLoad(name, InstanceState.READY, prefill_tokens_per_s=1000.0, **figures)


def test_the_least_loaded_leaves_where_caches_are_alike() -> None:
    loads = {name: load(name, pending_tokens=tokens) for name, tokens in (("a", 900), ("b", 100), ("c", 500))}
    assert plan_leaving(loads, {}, 128, count=2) == ("b", "c")


def test_prefixes_that_no_other_instance_has_keep_an_instance() -> None:
    loads = {"a": load("a"), "b": load("b", pending_tokens=200)}
    shared, alone = [1, 2, 3], list(range(100, 200))
    assert plan_leaving(loads, {"a": shared + alone, "b": shared}, 128) == ("b",)
    assert plan_leaving(loads, {"a": shared, "b": shared}, 128) == ("a",)


def test_running_requests_count_and_equal_costs_go_by_name() -> None:
    assert plan_leaving({"a": load("a", running_requests=4), "b": load("b")}, {}, 128) == ("b",)
    assert plan_leaving({"b": load("b"), "a": load("a")}, {}, 128) == ("a",)
