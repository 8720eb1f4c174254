from dataclasses import dataclass

import pytest

from dualmap.simulation.figures.run_times import run_times


@dataclass(frozen=True)
class Outcome:
    run: str
    arrival_s: float
    finish_s: float | None


def test_a_run_takes_from_its_first_turn_to_the_end_of_its_last_answer() -> None:
    outcomes = [Outcome("a", 0.0, 2.0), Outcome("a", 5.0, 9.0), Outcome("", 7.0, 8.0), Outcome("b", 20.0, 21.0)]

    times = run_times(outcomes, {"a": 2, "b": 1}, 0.0)

    assert times is not None
    assert (times.begun, times.ended, times.mean_s) == (1, 1, 9.0), "b began in the second half"
    assert times.ended_per_s == 1 / 20, "while turns arrived"


def test_a_run_that_did_not_end_counts_with_its_time_so_far() -> None:
    outcomes = [Outcome("a", 10.0, 12.0), Outcome("b", 10.0, None), Outcome("c", 50.0, 51.0)]

    times = run_times(outcomes, {"a": 1, "b": 1, "c": 1}, 10.0)

    assert times is not None
    assert (times.begun, times.ended) == (2, 1)
    assert times.mean_s == pytest.approx((2 + 40) / 2)


def test_a_run_that_did_not_end_counts_until_the_load_ended_however_late_its_answer_came() -> None:
    outcomes = [Outcome("a", 0.0, 1800.0), Outcome("b", 20.0, 21.0)]

    times = run_times(outcomes, {"a": 2, "b": 1}, 0.0)

    assert times is not None
    assert times.mean_s == 20.0


def test_the_short_third_has_the_fewest_turns_whatever_time_they_took() -> None:
    outcomes = [Outcome("short", 0.0, 30.0), Outcome("long", 0.0, 1.0), Outcome("long", 2.0, 3.0)]
    outcomes += [Outcome("longer", 0.0, 1.0), Outcome("longer", 2.0, 3.0), Outcome("longer", 80.0, 81.0)]

    times = run_times(outcomes, {"short": 1, "long": 2, "longer": 3}, 0.0)

    assert times is not None
    assert times.short_p90_s == 30.0
    assert times.p50_s == 30.0


def test_without_sessions_there_are_no_runs() -> None:
    assert run_times([Outcome("", 0.0, 1.0)], {}, 0.0) is None
