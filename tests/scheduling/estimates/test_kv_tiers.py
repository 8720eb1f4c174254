"""The price of a load."""

from __future__ import annotations

import math

import pytest

from dualmap.scheduling.estimates.kv_tiers import LoadPrice


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
