"""Prices of loads from an engine's counters."""

from __future__ import annotations

import math
import random

import pytest

from dualmap.scheduling.estimates.kv_tiers import LoadPrice, Tier
from dualmap.scheduling.estimates.load_prices import PRIORS, LoadReading, MeasuredPrice


def readings(price: LoadPrice, count: int, *, seed: int = 1, counts_loads: bool = True) -> list[LoadReading]:
    """Counters of a link with this price, read ``count`` times, with some loads of several sizes between two."""
    rng, now, made = random.Random(seed), LoadReading(0.0, 0.0), []
    for _ in range(count):
        for _ in range(rng.randrange(5)):
            tokens = rng.choice((500, 4000, 12_000, 60_000))
            busy_s = price.load_s(tokens) * rng.uniform(0.9, 1.1)
            now = LoadReading(now.tokens + tokens, now.busy_s + busy_s, now.loads + counts_loads)
        made.append(now)
    return made


def measured(*seen: LoadReading) -> MeasuredPrice:
    found = MeasuredPrice(Tier.HOST)
    for reading in seen:
        found.read(reading)
    return found


def test_before_anything_was_loaded_the_price_is_the_prior() -> None:
    idle = LoadReading(100.0, 3.0)

    assert measured().price == measured(idle, idle, idle).price == PRIORS[Tier.HOST]
    assert measured(idle, idle).why_prior == "nothing was loaded yet"
    assert measured(*readings(LoadPrice(0.01, 2e-5), 9)).why_prior == ""


@pytest.mark.parametrize("price", [LoadPrice(0.001, 2e-6), LoadPrice(0.03, 2.3e-5), LoadPrice(0.3, 1.3e-4)])
def test_a_price_is_measured_within_a_fifth_for_loads_of_every_size(price: LoadPrice) -> None:
    found = measured(*readings(price, 40)).price

    for tokens in (4000, 12_000, 60_000, 100_000):
        assert found.load_s(tokens) == pytest.approx(price.load_s(tokens), rel=0.2)


def test_where_loads_are_not_counted_their_starts_are_a_part_of_each_token() -> None:
    price = LoadPrice(0.0, 2.3e-5)
    found = measured(*readings(price, 40, counts_loads=False)).price

    assert found.load_s(12_000) - found.load_s(0) == pytest.approx(price.load_s(12_000), rel=0.2)


def test_a_link_that_became_slower_costs_more() -> None:
    found = measured(*readings(LoadPrice(0.01, 2e-6), 30))
    for reading in readings(LoadPrice(0.01, 8e-6), 60, seed=2)[30:]:
        found.read(reading)

    assert found.price.load_s(12_000) == pytest.approx(LoadPrice(0.01, 8e-6).load_s(12_000), rel=0.25)


def test_counters_that_went_back_are_those_of_another_engine() -> None:
    seen = readings(LoadPrice(0.01, 2e-5), 30)
    found = measured(*seen)
    before = found.price
    found.read(LoadReading(10.0, 0.5, 1.0))

    assert found.price == before
    assert not found.reason


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (LoadReading(2e6, 0.0, 9.0), "0 s for loads of"),
        (LoadReading(1010.0, 9e9), "s for loads of 1010 tokens"),
        (LoadReading(1e6, 1e-9), "1e-09 s for loads of 1e+06 tokens"),
        (LoadReading(1e300, 1e297), "no numbers that can be"),
        (LoadReading(1e6, 1.0, 1e200), "no numbers that can be"),
        (LoadReading(math.nan, 1.0), "no numbers"),
        (LoadReading(1e6, math.inf), "no numbers"),
        (LoadReading(-5.0, 1.0), "no numbers"),
    ],
)
def test_an_absurd_price_is_the_prior_until_sound_counters_come(wrong: LoadReading, why: str) -> None:
    found = measured(LoadReading(0.0, 0.0), wrong)

    assert why in found.reason == found.why_prior
    assert found.price == PRIORS[Tier.HOST]
    for reading in readings(LoadPrice(0.01, 2e-5), 40):
        found.read(reading)
    assert not found.reason
    assert found.price.load_s(12_000) == pytest.approx(LoadPrice(0.01, 2e-5).load_s(12_000), rel=0.2)
