"""The price of a load."""

from __future__ import annotations

import math

import pytest

from dualmap.scheduling.estimates.kv_tiers import LoadPrice, is_slow


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


def test_a_tier_is_slow_where_a_token_takes_as_long_to_load_as_to_compute() -> None:
    assert [is_slow(token_s, 1000.0) for token_s in (0.0009, 0.001, 0.002)] == [False, True, True]
