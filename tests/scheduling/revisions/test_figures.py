"""Figures of revisions as replicas add them up."""

from __future__ import annotations

from math import exp

import pytest

from dualmap.scheduling.revisions.figures import NO_FIGURES, Figures, Moments, figures_from, figures_text, total

TWO = Moments.of(0.5).plus(Moments.of(2.0))
SOME = Figures(7, 1, 6, 2, 5, ttft=TWO, tpot=Moments.of(0.01), prompt_tokens=900, hit_tokens=300)


def test_moments_have_the_geometric_mean_and_the_variance() -> None:
    both = Moments.of(0.5).plus(Moments.of(2.0))

    assert exp(both.mean) == pytest.approx(1.0)
    assert both.variance == pytest.approx(2 * 0.6931**2, rel=1e-3)
    assert Moments.of(1.0).variance == 0.0


def test_sums_are_added_and_taken_apart() -> None:
    twice = SOME.plus(SOME)

    assert twice.requests == 14
    assert twice.since(SOME).text == SOME.text
    assert total([SOME, SOME]) == twice
    assert SOME.since(twice) == SOME, "a process that began again counts less"


def test_a_heartbeat_carries_them_for_one_version_of_the_weights() -> None:
    text = figures_text(3, {"v1": SOME, "v=2": NO_FIGURES})

    found = figures_from(text, 3)

    assert found.keys() == {"v1", "v=2"}
    assert found["v1"].text == SOME.text
    assert figures_from(text, 4) == {}
    assert figures_text(3, {}) == ""


@pytest.mark.parametrize("text", ["", "3 v1=1,2", "3 v1=" + ",".join("x" * 14), "3 v1=" + ",".join(["nan"] * 19)])
def test_what_cannot_be_read_counts_as_nothing(text: str) -> None:
    assert figures_from(text, 3) == {}
