"""Draws, and what is kept of them."""

from __future__ import annotations

import pytest

from dualmap.scheduling.tenants.budgets import (
    Limit,
    Measure,
    Period,
    drawn_text,
    draws_from,
    draws_of,
    kept_of,
)

TODAY = "2027-01-15"
ALL = (
    Limit(Measure.REQUESTS, Period.MINUTE, 600),
    Limit(Measure.TOKENS, Period.MINUTE, 100_000),
    Limit(Measure.TOKENS, Period.MONTH, 10_000_000),
    Limit(Measure.TOKENS, Period.DAY, 1_000_000, "key:ci"),
    Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 50_000, "model:big"),
    Limit(Measure.REQUESTS, Period.IN_FLIGHT, 4),
)


def test_a_request_draws_from_the_budgets_of_its_tenant_its_key_and_its_model() -> None:
    draws = draws_of("acme", ALL, ("key:ci", "model:small"), 1000, 200, TODAY)

    assert [(draw.budget, draw.cost, draw.leak_per_s) for draw in draws] == [
        ("acme/requests/minute", 1, 10.0),
        ("acme/tokens/minute", 1200, 100_000 / 60),
        ("acme/tokens/month#2027-01", 1200, 0.0),
        ("acme/key:ci/tokens/day#2027-01-15", 1200, 0.0),
        ("acme/requests/in_flight", 1, 0.0),
    ]


@pytest.mark.parametrize(
    ("counted", "kept"),
    [
        ((1010, 35), (1, 1045, 1010, 35, 0)),
        ((1010, None), (1, 1200, 1010, 200, 0)),
        ((None, None), (1, 1200, 1000, 200, 0)),
    ],
)
def test_an_answered_request_keeps_what_its_instance_counted(
    counted: tuple[int | None, int | None], kept: tuple[int, ...]
) -> None:
    limits = (
        Limit(Measure.REQUESTS, Period.MINUTE, 600),
        Limit(Measure.TOKENS, Period.MINUTE, 100_000),
        Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 50_000),
        Limit(Measure.OUTPUT_TOKENS, Period.MINUTE, 50_000),
        Limit(Measure.TOKENS, Period.IN_FLIGHT, 4),
    )
    draws = draws_of("acme", limits, (), 1000, 200, TODAY)

    assert kept_of(draws, *counted, answered=True) == kept
    assert kept_of(draws, *counted, answered=False) == (0, 0, 0, 0, 0)


def test_the_text_of_draws_can_be_read_again() -> None:
    draws = draws_of("acme", ALL, ("key:ci", "model:big"), 1000, 200, TODAY)

    assert draws_from(drawn_text(draws)) == [(draw.budget, draw.cost) for draw in draws]
    assert draws_from("") == []


def test_a_request_beyond_the_whole_limit_never_fits() -> None:
    (draw,) = draws_of("acme", (Limit(Measure.TOKENS, Period.MINUTE, 1000),), (), 900, 101, TODAY)

    assert draw.never_fits
