"""Draws, and what is given back of them."""

from __future__ import annotations

import pytest

from dualmap.scheduling.tenants.budgets import (
    NOTHING_RETURNED,
    Limit,
    Measure,
    Period,
    budgets_of,
    drawn_text,
    draws_from,
    draws_of,
    returned_text,
)

ALL = (
    Limit(Measure.REQUESTS, Period.MINUTE, 600),
    Limit(Measure.TOKENS, Period.MINUTE, 100_000),
    Limit(Measure.TOKENS, Period.MONTH, 10_000_000),
    Limit(Measure.TOKENS, Period.DAY, 1_000_000, "key:ci"),
    Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 50_000, "model:big"),
    Limit(Measure.REQUESTS, Period.IN_FLIGHT, 4),
)


def test_a_request_draws_from_the_budgets_of_its_tenant_its_key_and_its_model() -> None:
    draws = draws_of(budgets_of("acme", ALL), ("key:ci", "model:small"), 1000, 200)

    assert [(draw.budget, draw.cost, draw.leak_per_s) for draw in draws] == [
        ("acme/requests/minute", 1, 10.0),
        ("acme/tokens/minute", 1200, 100_000 / 60),
        ("acme/tokens/month", 1200, 0.0),
        ("acme/key:ci/tokens/day", 1200, 0.0),
        ("acme/requests/in_flight", 1, 0.0),
    ]


@pytest.mark.parametrize(
    ("counted", "returned"),
    [
        ((1010, 35), {"tokens/minute": 155, "prompt_tokens/minute": -10, "output_tokens/minute": 165}),
        ((1010, None), {"prompt_tokens/minute": -10}),
        ((None, None), {}),
    ],
)
def test_an_answered_request_keeps_what_its_instance_counted(
    counted: tuple[int | None, int | None], returned: dict[str, int]
) -> None:
    limits = (
        Limit(Measure.REQUESTS, Period.MINUTE, 600),
        Limit(Measure.TOKENS, Period.MINUTE, 100_000),
        Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 50_000),
        Limit(Measure.OUTPUT_TOKENS, Period.MINUTE, 50_000),
        Limit(Measure.TOKENS, Period.IN_FLIGHT, 4),
    )
    draws = draws_of(budgets_of("acme", limits), (), 1000, 200)

    returned |= {"tokens/in_flight": 1200}
    text = returned_text(draws, *counted, answered=True)
    leak = ":833.3333333333334"
    assert text == " ".join([f"acme/{name} {each}{leak if each < 0 else ''}" for name, each in returned.items()])
    assert draws_from(returned_text(draws, *counted, answered=False)) == draws_from(drawn_text(draws))


def test_a_request_that_gives_nothing_back_says_so() -> None:
    draws = draws_of(budgets_of("acme", (Limit(Measure.REQUESTS, Period.MINUTE, 600),)), (), 1000, 200)

    assert returned_text(draws, 1010, 35, answered=True) == NOTHING_RETURNED


def test_the_text_of_draws_can_be_read_again() -> None:
    draws = draws_of(budgets_of("acme", ALL), ("key:ci", "model:big"), 1000, 200)

    assert draws_from(drawn_text(draws)) == [(draw.budget, draw.cost) for draw in draws]
    assert draws_from("") == []


def test_a_request_beyond_the_whole_limit_never_fits() -> None:
    (draw,) = draws_of(budgets_of("acme", (Limit(Measure.TOKENS, Period.MINUTE, 1000),)), (), 900, 101)

    assert draw.never_fits
