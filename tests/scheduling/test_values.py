"""Values of the hot path."""

from __future__ import annotations

import pytest

from scheduling.values import value


@value
class Tokens:
    count: int
    cached: int = 0


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    assert Tokens(3) == Tokens(3, 0) != Tokens(3, 1)
    assert len({Tokens(3), Tokens(3, 0), Tokens(4)}) == 2


def test_a_value_is_made_without_a_call_for_each_of_its_fields() -> None:
    assert Tokens.__setattr__ is object.__setattr__


def test_a_value_takes_no_field_that_it_does_not_declare() -> None:
    with pytest.raises(AttributeError):
        Tokens(3).other = 1  # type: ignore[attr-defined]
