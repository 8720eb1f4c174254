"""The division of a limit among pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.tenants.allotments import KEPT, Division, divided, equal_part, in_force, within

POOLS = ("a", "b", "c", "d")


@given(st.integers(1, 2**53), st.integers(1, 20))
def test_equal_parts_are_the_amount_together(amount: int, pools: int) -> None:
    parts = [equal_part(amount, place, pools) for place in range(pools)]

    assert sum(parts) == amount
    assert max(parts) - min(parts) <= 1


def test_a_pool_begins_with_an_equal_part_or_with_nothing() -> None:
    assert Division(("a", "b", "c"), 0, begins=True).first_part(100) == 34
    assert Division(("a", "b", "c"), 2, begins=True).first_part(100) == 33
    assert Division(("a", "b", "c"), 0, begins=False).first_part(100) == 0


@given(
    st.integers(0, 2**53),
    st.dictionaries(st.sampled_from(POOLS), st.integers(0, 10**6), min_size=1),
    st.dictionaries(st.sampled_from(POOLS), st.integers(0, 10**6)),
    st.sets(st.sampled_from(POOLS)),
)
def test_parts_are_never_more_than_the_amount_and_leave_what_is_used(
    amount: int, used: dict[str, int], wanted: dict[str, int], pools: set[str]
) -> None:
    parts = divided(amount, used, wanted, pools)

    assert parts.keys() == used.keys()
    assert sum(parts.values()) <= amount
    assert all(part >= 0 for part in parts.values())
    if sum(used.values()) <= amount:
        assert all(parts[pool] >= each for pool, each in used.items())
        if pools & used.keys():
            assert sum(parts.values()) == amount
        assert all(parts[pool] == used[pool] for pool in used if pool not in pools)


@given(st.integers(0, 10**9), st.integers(1, 10**9), st.integers(1, 10**9))
def test_parts_of_a_limit_that_is_changed_are_within_the_new_one(part: int, of: int, amount: int) -> None:
    rest = max(0, of - part)

    if part <= of:
        assert in_force(part, of, amount) + in_force(rest, of, amount) <= amount


def test_a_pool_that_wants_more_gets_what_others_leave_unused_but_some_of_it() -> None:
    parts = divided(600, {"a": 300, "b": 0}, {"a": 0}, ("a", "b"))

    assert parts == {"a": 300 + 300 - 300 // KEPT, "b": 300 // KEPT}


@pytest.mark.parametrize("needs", [0, 200, 300])
def test_a_request_that_fits_into_what_is_unused_anywhere_gets_it(needs: int) -> None:
    parts = divided(600, {"a": 300, "b": 0}, {"a": needs, "b": 0}, ("a", "b"))

    assert parts["a"] >= 300 + needs
    assert sum(parts.values()) == 600


def test_the_smallest_need_comes_first_and_one_that_cannot_be_met_takes_nothing_from_it() -> None:
    parts = divided(100, {"a": 50, "b": 0, "c": 0}, {"a": 60, "b": 30, "c": 20}, ("a", "b", "c"))

    assert parts == {"a": 50, "b": 30, "c": 20}


def test_what_is_overdrawn_is_shared_by_what_is_used() -> None:
    assert divided(100, {"a": 150, "b": 50}, {"b": 1}, ("a", "b")) == {"a": 75, "b": 25}


def test_where_a_pool_used_more_meanwhile_the_part_that_grows_the_most_grows_less() -> None:
    assert within(100, {"a": 30, "b": 60, "c": 10}, {"a": 40, "b": 20, "c": 5}) == {"a": 40, "b": 50, "c": 10}


@given(
    st.integers(0, 1000),
    st.fixed_dictionaries({pool: st.tuples(st.integers(0, 500), st.integers(0, 500)) for pool in POOLS}),
)
def test_no_part_is_below_what_its_pool_has_nor_all_of_them_above_the_amount_but_by_that(
    amount: int, pools: dict[str, tuple[int, int]]
) -> None:
    has = {pool: had for pool, (_, had) in pools.items()}
    parts = within(amount, {pool: part for pool, (part, _) in pools.items()}, has)

    assert all(parts[pool] >= had for pool, had in has.items())
    assert sum(parts.values()) <= max(amount, sum(has.values()))
