"""How long a pull takes, and where it pays."""

from __future__ import annotations

import pytest

from dualmap.scheduling.estimates.pulls import copy_s, pull_ends_s, pull_pays
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState


def target(cached_blocks: int) -> InstanceLoad:
    """An instance that keeps ten blocks of 16 tokens, and computes a thousand tokens a second."""
    return InstanceLoad(
        "a", InstanceState.READY, cached_blocks=cached_blocks, kv_capacity_tokens=160, prefill_tokens_per_s=1000.0
    )


@pytest.mark.parametrize(("cached_blocks", "seconds"), [(0, 0.0), (8, 0.0), (9, 0.016), (10, 0.032), (12, 0.032)])
def test_a_copy_costs_what_computing_again_takes_of_what_it_takes_the_place_of(
    cached_blocks: int, seconds: float
) -> None:
    assert copy_s(target(cached_blocks), 32, 16) == pytest.approx(seconds)


def test_a_pull_begins_when_the_last_of_its_links_is_free_and_its_source_has_what_is_pulled() -> None:
    assert [
        pull_ends_s(1.0, *waits) for waits in ((0.0, 0.0, 0.0), (3.0, 2.0, 1.0), (1.0, 3.0, 2.0), (0.0, 2.0, 4.0))
    ] == [
        1.0,
        4.0,
        4.0,
        5.0,
    ]


@pytest.mark.parametrize(
    ("cost", "ttft_s", "pays"),
    [
        (1.0, 1.0, True),
        (2.0, 1.0, False),  # computing costs no more
        (1.0, 3.0, False),  # the best instance answers as soon without any pull
        (3.0, 1.0, False),
    ],
)
def test_a_pull_pays_where_it_costs_less_than_computing_and_comes_sooner_than_without_any(
    cost: float, ttft_s: float, pays: bool
) -> None:
    assert pull_pays(cost, unpulled_cost=2.0, ttft_s=ttft_s, best_ttft_s=3.0) is pays
