"""The figures of the live page, as plain data."""

from __future__ import annotations

from dualmap.router.ui.figures import longest_hot
from dualmap.scheduling.state.hotness import HotnessTree


def test_of_a_long_hot_prefix_the_longest_is_listed_and_not_all_that_it_begins_with() -> None:
    long = {100 + depth: depth for depth in range(1, 13)}
    short = {200 + depth: depth for depth in range(1, 5)}

    assert longest_hot(HotnessTree(long)) == [(112, 12)]
    assert {(112, 12), (204, 4)} <= set(longest_hot(HotnessTree(long | short)))
    assert len(longest_hot(HotnessTree(long | short))) == 3  # which of the two of depth 4 goes on is not known
    assert longest_hot(HotnessTree()) == []
