"""Where instances are put."""

from __future__ import annotations

import argparse

import pytest
from real_fleet.errors import LackingError
from real_fleet.instances import add_arguments, cards_for
from real_fleet.machine import Card

CARDS = tuple(Card(index, "a card", 81_559, "580.1") for index in range(4))


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_only_the_cards_that_are_used_are_named() -> None:
    assert cards_for(options(), CARDS) == CARDS
    assert cards_for(options("--cards", "2,0"), CARDS) == (CARDS[2], CARDS[0])
    assert cards_for(options("--url", "http://x:1"), CARDS) == cards_for(options("--emulated"), ()) == ()


@pytest.mark.parametrize("words", [("--cards", "4"), ("--cards", ","), ("--url", "http://x:1", "--emulated")])
def test_cards_that_are_not_there_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(LackingError):
        cards_for(options(*words), CARDS)
