from __future__ import annotations

from scheduling.overdue_work import OverdueWork


def test_work_adds_up_and_runs_out_evenly() -> None:
    overdue = OverdueWork().after(6_000.0, 1_000, 0.25).after(2_000.0, 5_000, 0.25)

    assert overdue == OverdueWork(7_000.0, 5_000)
    assert overdue.read(9_000, 0.25) == 6_000.0
    assert overdue.read(33_000, 0.25) == overdue.read(99_000, 0.25) == 0.0


def test_a_clock_that_steps_back_lets_nothing_out() -> None:
    overdue = OverdueWork(7_000.0, 5_000)

    assert overdue.read(1_000, 0.25) == 7_000.0
    assert overdue.after(1_000.0, 1_000, 0.25) == OverdueWork(8_000.0, 1_000), "from then on it runs out by that clock"
