"""Whether a new revision is as good as the one before."""

from __future__ import annotations

from math import exp
from random import Random

import pytest

from dualmap.scheduling.revisions.figures import NO_FIGURES, Figures, Moments
from dualmap.scheduling.revisions.gate import (
    ALPHA,
    Bounds,
    Events,
    Standing,
    event_evidence,
    half_width,
    judge,
    overall,
)

HOUR = 36_000
"""Requests."""


class Traffic:
    """Requests of two revisions; those of a session resemble each other."""

    def __init__(self, seed: int, *, ttft: float = 1.0, errors: float = 0.002, tpot: float = 1.0) -> None:
        self._random = Random(seed)
        self._new = {"ttft": ttft, "errors": errors, "tpot": tpot}
        self.sums = {False: NO_FIGURES, True: NO_FIGURES}
        self.harmed = 0

    def session(self, percent: float) -> int:
        """A session of five requests; returns how many the new revision served late or failed because of itself."""
        random, is_new = self._random, self._random.random() * 100 < percent
        alike = random.gauss(0, 0.5)
        worse = self._new if is_new else {"ttft": 1.0, "errors": 0.002, "tpot": 1.0}
        for _ in range(5):
            plain_s = exp(-1 + alike + random.gauss(0, 0.85))
            ttft_s, tpot_s = plain_s * worse["ttft"], 0.02 * exp(random.gauss(0, 0.3)) * worse["tpot"]
            failed, late = random.random() < worse["errors"], ttft_s > 5
            self.harmed += is_new and (failed or (late and plain_s <= 5))
            times = {"ttft": Moments.of(ttft_s), "tpot": Moments.of(tpot_s)}
            one = Figures(1, failed, 1, late, 1, tpot_s > 0.05, **times)
            self.sums[is_new] = self.sums[is_new].plus(one)
        return 5

    def until_judged(self, percents: tuple[float, ...] = (5, 10, 25, 50)) -> tuple[Standing, int]:
        """The end of a rollout within an hour, and the requests until then; the gate looks every second."""
        sent = 0
        for percent in percents:
            self.sums = {False: NO_FIGURES, True: NO_FIGURES}
            while True:
                for _ in range(20):
                    sent += self.session(percent)
                standing = overall(judge(self.sums[False], self.sums[True], Bounds()), self.sums[True])
                if standing is Standing.WORSE or sent >= HOUR:
                    return standing, sent
                if standing is not Standing.OPEN:
                    break
        return Standing.WITHIN, sent


def test_of_twenty_equal_revisions_none_is_stopped_and_most_are_through_within_the_hour() -> None:
    ends = [Traffic(seed).until_judged()[0] for seed in range(20)]

    assert Standing.WORSE not in ends
    assert ends.count(Standing.WITHIN) >= 15


@pytest.mark.parametrize("worse", [{"ttft": 1.5}, {"errors": 0.02}, {"tpot": 1.5}])
def test_a_worse_revision_is_stopped_before_it_harms_a_hundredth_of_the_hour(worse: dict[str, float]) -> None:
    for seed in range(10):
        traffic = Traffic(seed, **worse)

        assert traffic.until_judged()[0] is Standing.WORSE
        assert traffic.harmed < HOUR / 100


def test_a_better_revision_is_found_to_be_better() -> None:
    traffic = Traffic(1, ttft=0.5)
    for _ in range(2000):
        traffic.session(50)

    judged = {each.name: each.standing for each in judge(traffic.sums[False], traffic.sums[True], Bounds())}

    assert judged["ttft"] is Standing.BETTER


def test_a_little_worse_is_within_the_bound_that_the_operator_allows() -> None:
    traffic = Traffic(1, ttft=1.1)
    for _ in range(4000):
        traffic.session(50)
    before, new = traffic.sums[False], traffic.sums[True]

    def ttft(bound: float) -> Standing:
        return judge(before, new, Bounds(ttft=bound))[0].standing

    assert (ttft(1.3), ttft(1.02)) == (Standing.WITHIN, Standing.WORSE)


def test_few_figures_say_nothing() -> None:
    few = Figures(20, 0, 20, 0, 20, 0, ttft=Moments(20, 1.0, 2.0), tpot=Moments(20, 1.0, 2.0))

    assert overall(judge(few, few, Bounds()), few) is Standing.OPEN
    assert overall(judge(NO_FIGURES, NO_FIGURES, Bounds()), NO_FIGURES) is Standing.OPEN, "without any request"


def test_what_is_not_served_at_all_holds_nothing_up() -> None:
    """No answer streams."""
    many = Figures(5000, 0, 5000, 10)

    assert overall(judge(many, many, Bounds()), many) is Standing.WITHIN


@pytest.mark.parametrize("failures", [4, 5, 9])
def test_some_errors_against_none_are_evidence_and_one_is_not(failures: int) -> None:
    assert event_evidence(Events(2000, 0), Events(100, failures)) > 1 / ALPHA
    assert event_evidence(Events(2000, 0), Events(100, 1)) < 20
    assert event_evidence(Events(2000, failures * 20), Events(100, failures)) < 1
    assert event_evidence(Events(), Events(100, failures)) == 1


def test_equal_events_pass_the_limit_no_more_often_than_promised() -> None:
    random, passed = Random(7), 0
    for _ in range(400):
        before, new = Events(), Events()
        for _ in range(300):
            is_new, bad = random.random() < 0.2, random.random() < 0.1
            before = before if is_new else Events(before.of + 1, before.bad + bad)
            new = Events(new.of + 1, new.bad + bad) if is_new else new
            if event_evidence(before, new) >= 20:  # of which one in twenty may pass
                passed += 1
                break

    assert passed <= 400 / 20


def test_a_confidence_sequence_is_wider_than_an_interval_and_narrows() -> None:
    assert half_width(0.01, 0.3, 0.05) > 1.96 * 0.1
    assert half_width(0.0001, 0.3) < half_width(0.01, 0.3) / 5
    assert half_width(0.0, 0.3) == 0.0


def test_figures_of_the_operators_own_are_judged_like_errors() -> None:
    bounds = Bounds.of({"wrong": 0.02, "ttft": 1.5})
    many = Figures(5000, 0, 5000, 10)

    judged = judge(many, many, bounds, {"wrong": (Events(2000, 20), Events(300, 30))})

    assert bounds.ttft == 1.5
    assert judged[-1].name == "wrong"
    assert judged[-1].standing is Standing.WORSE
    assert "points" in judged[-1].text
    assert overall(judge(many, many, bounds), many) is Standing.WITHIN, "none was reported"


@pytest.mark.parametrize("given", [{"ttft": 1.0}, {"tpot": float("nan")}, {"errors": 0.0}, {"own": 2.0}])
def test_impossible_bounds_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Bounds.of(given)
