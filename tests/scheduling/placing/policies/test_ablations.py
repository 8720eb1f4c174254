"""The ablations of DualMap and the single ring, side by side on the same loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.state.instance import InstanceLoad

Choose = Callable[..., Decision]
Load = Callable[..., InstanceLoad]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dualmap", "idle"),  # the hit misses the SLO
        ("dualmap-cache-affinity", "cached"),
        ("dualmap-least-loaded", "idle"),
        ("dualmap-min-ttft", "idle"),
        ("cache-affinity", "cached"),
    ],
)
def test_far_past_the_slo_only_blind_affinity_stays_with_the_hit(
    name: str, expected: str, choose: Choose, load: Load
) -> None:
    decision = choose(name, load("cached", hit_blocks=9, pending_tokens=10**6), load("idle"))

    assert decision.instance_id == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dualmap", "cached"),
        ("dualmap-cache-affinity", "cached"),
        ("dualmap-least-loaded", "idle"),
        ("dualmap-min-ttft", "cached"),
    ],
)
def test_under_light_load_only_blind_balance_leaves_a_hit_that_pays(
    name: str, expected: str, choose: Choose, load: Load
) -> None:
    # given 0.1 s of queue + 0.1 s of computing at the hit, 1 s of computing elsewhere
    decision = choose(name, load("cached", hit_blocks=9, pending_tokens=100), load("idle"))

    assert decision.instance_id == expected


@pytest.mark.parametrize("name", ["dualmap-cache-affinity", "dualmap-least-loaded", "dualmap-min-ttft"])
def test_equal_hits_go_to_the_less_loaded_from_either_ring(name: str, choose: Choose, load: Load) -> None:
    loads = load("busy", pending_tokens=500), load("idle")

    assert choose(name, *loads).instance_id == choose(name, *reversed(loads)).instance_id == "idle"


def test_one_ring_never_looks_at_load_or_hits(choose: Choose, load: Load) -> None:
    decision = choose("cache-affinity", load("owner", pending_tokens=10**6), load("other", hit_blocks=9))

    assert (decision.instance_id, decision.alternative_id) == ("owner", "other")


@pytest.mark.parametrize("name", ["dualmap", "dualmap-cache-affinity", "dualmap-least-loaded", "dualmap-min-ttft"])
def test_among_equals_the_one_with_less_kv_memory_in_use_is_taken(name: str, choose: Choose, load: Load) -> None:
    assert choose(name, load("a", context_tokens=9000), load("b", context_tokens=100)).instance_id == "b"


@pytest.mark.parametrize("name", ["dualmap", "dualmap-cache-affinity", "dualmap-least-loaded"])
def test_deferred_work_is_load_as_well(name: str, choose: Choose, load: Load) -> None:
    late = load("late", pending_tokens=2000, deferred_tokens=2000)

    assert choose(name, late, load("busy", pending_tokens=1000)).instance_id == "busy"


@pytest.mark.parametrize(
    ("name", "with_a_larger_hit", "with_equal_hits"),
    [
        ("dualmap", Reason.CACHE, Reason.BALANCE),
        ("dualmap-cache-affinity", Reason.CACHE, Reason.BALANCE),
        ("dualmap-least-loaded", Reason.BALANCE, Reason.BALANCE),
        ("dualmap-min-ttft", Reason.COST, Reason.COST),
        ("cache-affinity", Reason.CACHE, Reason.CACHE),
    ],
)
def test_each_says_why(
    name: str, with_a_larger_hit: Reason, with_equal_hits: Reason, choose: Choose, load: Load
) -> None:
    assert choose(name, load("a", hit_blocks=2), load("b")).reason is with_a_larger_hit
    assert choose(name, load("a"), load("b", pending_tokens=1)).reason is with_equal_hits
