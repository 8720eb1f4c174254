"""The price of a load."""

from __future__ import annotations

import math

import pytest

from dualmap.scheduling.estimates.kv_tiers import NO_LOAD, InstanceTiers, LoadPrice, cheapest_load


def test_a_load_costs_a_start_and_a_time_for_each_token_and_none_costs_nothing() -> None:
    price = LoadPrice(0.01, 0.0001)

    assert price.load_s(1000) == pytest.approx(0.11)
    assert price.load_s(0) == 0.0


@pytest.mark.parametrize(
    ("start_s", "token_s"), [(0.0, 0.0), (-1.0, 0.1), (0.0, math.inf), (math.nan, 0.1), (0.1, math.nan)]
)
def test_an_absurd_price_is_refused(start_s: float, token_s: float) -> None:
    with pytest.raises(ValueError, match="a load needs"):
        LoadPrice(start_s, token_s)


def test_an_instance_without_tiers_loads_nothing_and_is_forbidden_nothing() -> None:
    assert cheapest_load(InstanceTiers(), (), (100,), 16, 1000.0, 0.0) == NO_LOAD
