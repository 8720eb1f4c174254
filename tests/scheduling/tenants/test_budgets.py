"""Draws, and what is given back of them."""

from __future__ import annotations

import struct

import orjson
import pytest

from dualmap.scheduling.tenants.allotments import ROUND_S, Division
from dualmap.scheduling.tenants.budgets import (
    DIVIDED,
    BudgetGroup,
    Drawn,
    Lack,
    Limit,
    Measure,
    Period,
    budgets_of,
    drawn_of,
    drawn_text,
    entry_of,
    group_of,
    returned,
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
    budgets = budgets_of("acme", ALL)
    group = group_of(budgets, ("key:ci", "model:small"))
    assert group is not None
    draws = group.draws(1000, 200)

    assert [(each.budget.name, each.cost, each.budget.entry) for each in draws.each] == [
        ("acme/requests/minute", 1, ("acme", 0)),
        ("acme/tokens/minute", 1200, ("acme", 12)),
        ("acme/tokens/month", 1200, ("acme", 14)),
        ("acme/requests/in_flight", 1, ("acme", 3)),
        ("acme/key:ci/tokens/day", 1200, ("acme/key:ci", 13)),
    ]
    assert group_of(budgets[3:5], ("key:other", "model:small")) is None


@pytest.mark.parametrize(
    ("counted", "amounts"),
    [
        ((1010, 35), {"tokens/minute": 155, "prompt_tokens/minute": -10, "output_tokens/minute": 165}),
        ((1010, None), {"prompt_tokens/minute": -10}),
        ((None, None), {}),
    ],
)
def test_an_answered_request_keeps_what_its_instance_counted(
    counted: tuple[int | None, int | None], amounts: dict[str, int]
) -> None:
    limits = (
        Limit(Measure.REQUESTS, Period.MINUTE, 600),
        Limit(Measure.TOKENS, Period.MINUTE, 100_000),
        Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 50_000),
        Limit(Measure.OUTPUT_TOKENS, Period.MINUTE, 50_000),
        Limit(Measure.TOKENS, Period.IN_FLIGHT, 4),
    )
    draws = BudgetGroup(budgets_of("acme", limits)).draws(1000, 200)

    gives_back = returned(draws, *counted, answered=True)
    found = {each.budget.name.removeprefix("acme/"): each.cost for each in gives_back.each if each.cost}
    assert found == amounts | {"tokens/in_flight": 1200}
    assert returned(draws, *counted, answered=False) == draws


def test_the_text_of_draws_has_each_budget_and_its_cost_in_their_order() -> None:
    draws = BudgetGroup(budgets_of("acme", ALL)).draws(1000, 200)

    assert drawn_text(draws) == " ".join([f"{each.budget.name} {each.cost}" for each in draws.each])


def test_draws_are_packed_by_books_for_the_scripts_whatever_a_model_is_called() -> None:
    model = 'model:50%d "é"'
    limits = [
        Limit(Measure.REQUESTS, Period.MINUTE, 600),
        Limit(Measure.TOKENS, Period.DAY, 9, model),
        Limit(Measure.TOKENS, Period.MONTH, 5000),
    ]
    division = Division(("a", "b"), 0, begins=True)
    draws = BudgetGroup(budgets_of("acme", limits, division)).draws(1000, 200)

    book = "acme/model:50%25d%20%22é%22".encode()
    packed = struct.pack("<BH4sBddBdd", 2, 4, b"acme", DIVIDED + 0, 1, 600, DIVIDED + 14, 1200, 5000)
    assert draws.packed == packed + struct.pack(f"<BH{len(book)}sBdd", 1, len(book), book, 13, 1200, 9)
    assert orjson.loads(draws.group.divisions) == [
        ["acme/requests/minute", 300, "a,b"],
        ["acme/tokens/month", 2500, "a,b"],
    ]
    assert drawn_text(BudgetGroup(budgets_of("acme", limits)).draws(1000, 200)) == (
        "acme/requests/minute 1 acme/tokens/month 1200 acme/model:50%25d%20%22é%22/tokens/day 1200"
    )


def test_no_kind_of_limit_gets_another_number() -> None:
    kinds = [entry_of(f"a/b/{measure}/{period}") for measure in Measure for period in Period]

    assert kinds == [("a/b", number) for number in range(16)]
    assert (entry_of("a/requests/minute")[1], entry_of("a/prompt_tokens/day")[1]) == (0, 5)
    assert (entry_of("a/output_tokens/month")[1], entry_of("a/tokens/in_flight")[1]) == (10, 15)


def test_a_request_beyond_the_whole_limit_never_fits() -> None:
    (draw,) = BudgetGroup(budgets_of("acme", (Limit(Measure.TOKENS, Period.MINUTE, 1000),))).draws(900, 101).each

    assert draw.never_fits


@pytest.mark.parametrize(
    ("period", "lack", "wait_s"),
    [
        (Period.MINUTE, Lack(0, 10.5, 600), 1.05),
        (Period.MINUTE, Lack(0, 1.0, 300, 0), 0.2),  # at the rate of the part
        (Period.MINUTE, Lack(0, 10.0, 300, 0), ROUND_S + 1.0),  # at the whole rate, as the leader brings it from others
        (Period.MINUTE, Lack(0, 10.0, 300, 4), ROUND_S + 0.6),
        (Period.MINUTE, Lack(0, 10.0, 300, 10), ROUND_S),
        (Period.MINUTE, Lack(0, 1.0, 99, 1), ROUND_S),  # more than the part ever holds
        (Period.MINUTE, Lack(0, 10.0, 99, 0), ROUND_S + 1.0),
        (Period.DAY, Lack(0, 10.0, 600), 0.0),
        (Period.DAY, Lack(0, 10.0, 300, 10), ROUND_S),
        (Period.DAY, Lack(0, 10.0, 300, 9), 0.0),
        (Period.IN_FLIGHT, Lack(0, 10.0, 300, 600), 0.0),
    ],
)
def test_a_draw_fits_once_enough_has_leaked_or_came_from_other_pools(period: Period, lack: Lack, wait_s: float) -> None:
    division = None if lack.elsewhere is None else Division(("a", "b"), 0, begins=True)
    draws = BudgetGroup(budgets_of("acme", [Limit(Measure.TOKENS, period, 600)], division)).draws(60, 40)

    assert drawn_of(draws, (-10,), [lack]) == Drawn((-10,), 0, wait_s)


def test_a_draw_of_nothing_from_a_pool_without_a_part_waits_for_a_round() -> None:
    division = Division(("a", "b"), 0, begins=False)
    draws = BudgetGroup(budgets_of("acme", [Limit(Measure.TOKENS, Period.MINUTE, 60)], division)).draws(0, 0)

    assert drawn_of(draws, (-1,), [Lack(0, 1.0, 0, 0)]).wait_s == ROUND_S + 1.0


@pytest.mark.parametrize(
    ("parts", "left", "unused_in_s"),
    [
        ({}, 588, 1.2),
        ({0: 600}, 588, 1.2),
        ({0: 300}, 288, 2.4),  # at half of the rate
        ({0: 300}, 300, 0.0),
        ({0: 300}, 301, 0.0),  # the limit was raised meanwhile
        ({0: 300}, -60, 60.0),
        ({0: 0}, -12, 60.0),
        ({0: 0}, 0, 0.0),
    ],
)
def test_nothing_is_used_of_a_part_after_the_time_in_which_it_leaks(
    parts: dict[int, int], left: int, unused_in_s: float
) -> None:
    assert Drawn((left,), parts=parts).unused_in_s(0, 600) == pytest.approx(unused_in_s)


def test_the_first_of_the_draws_that_take_longest_to_fit_is_named() -> None:
    limits = [Limit(measure, Period.MINUTE, 600) for measure in Measure]
    draws = BudgetGroup(budgets_of("acme", limits)).draws(60, 40)

    lacks = [Lack(0, 5.0, 600), Lack(1, 20.0, 600), Lack(3, 20.0, 600)]
    assert drawn_of(draws, (-5, -20, 0, -20), lacks) == Drawn((-5, -20, 0, -20), 1, 2.0)


def test_a_spent_quota_is_named_before_what_leaks() -> None:
    limits = [Limit(Measure.TOKENS, Period.MINUTE, 600), Limit(Measure.TOKENS, Period.DAY, 600)]
    draws = BudgetGroup(budgets_of("acme", limits)).draws(60, 40)

    lacks = [Lack(0, 5.0, 600), Lack(1, 5.0, 600)]
    assert drawn_of(draws, (-5, -5), lacks) == Drawn((-5, -5), 1, 0.0)
