from __future__ import annotations

from math import e

import pytest

from dualmap.scheduling.estimates.load_window import WINDOW_MS, LoadWindow


def test_assigned_work_adds_up_and_fades() -> None:
    window = LoadWindow().add(1_000, 600).add(1_000, 400)

    assert window.read(1_000) == 1000.0
    assert window.read(1_000 + WINDOW_MS) == pytest.approx(1000 / e)


def test_reading_does_not_depend_on_when_work_was_added_in_between() -> None:
    through = LoadWindow(1000.0, 0).add(60_000, 0)

    assert through.read(120_000) == pytest.approx(LoadWindow(1000.0, 0).read(120_000))


def test_a_clock_that_steps_back_neither_decays_nor_grows() -> None:
    window = LoadWindow(1000.0, 5_000)

    assert window.read(1_000) == 1000.0
    assert window.add(1_000, 100) == LoadWindow(1100.0, 1_000), "from then on it fades by that clock"
