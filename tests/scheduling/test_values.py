"""Values of the hot path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduling.values import value


@value
class Tokens:
    count: int
    cached: int = 0


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    assert Tokens(3) == Tokens(3, 0) != Tokens(3, 1)
    assert len({Tokens(3), Tokens(3, 0), Tokens(4)}) == 2


def test_a_value_is_replaced_and_not_changed() -> None:
    tokens = Tokens(3)

    assert replace(tokens, cached=2) == Tokens(3, 2)
    assert tokens == Tokens(3)


def test_a_value_takes_no_field_that_it_does_not_declare() -> None:
    with pytest.raises(AttributeError):
        Tokens(3).other = 1  # type: ignore[attr-defined]
