"""The ablations of DualMap and the single ring, side by side on the same loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduling.decision import Decision
from scheduling.instance import InstanceLoad

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
    decision = choose(name, load("cached", hit_blocks=9, pending_tokens=90_000), load("idle"))

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


def test_equal_loads_let_the_hit_decide(choose: Choose, load: Load) -> None:
    assert choose("dualmap-least-loaded", load("a"), load("b", hit_blocks=1)).instance_id == "b"


def test_one_ring_never_looks_at_load_or_hits(choose: Choose, load: Load) -> None:
    decision = choose("cache-affinity", load("owner", pending_tokens=10**6), load("other", hit_blocks=9))

    assert (decision.instance_id, decision.alternative_id) == ("owner", "other")
    assert decision.seen_pending_tokens is None
