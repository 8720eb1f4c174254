"""Whether a batch will be done within its window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.batches.batch import RANGE_LINES, Status
from dualmap.scheduling.batches.window import MEASURED_FOR_S, MEASURED_FROM_S, Delay, Outlook, Pace, outlook
from tests.support.batches import NEW_BATCH

RUNNING = replace(NEW_BATCH.entered(Status.IN_PROGRESS, 100), lines=100 * RANGE_LINES, expires_s=1100)
CALM: dict[str, Any] = {"line_s": 10.0, "waiting": False, "refused": False, "failing": False}


def test_a_batch_that_is_fast_enough_ends_at_its_rate() -> None:
    assert outlook(RUNNING, 50, 8.0, 100, **CALM) == Outlook(ends_s=200.0)
    assert outlook(RUNNING, 100, 0.0, 100, **CALM).delay is None, "nothing is left to do"


@pytest.mark.parametrize(
    ("seen", "delay"),
    [
        ({}, Delay.SPEED),
        ({"waiting": True}, Delay.ROOM),
        ({"waiting": True, "refused": True}, Delay.LIMITS),
        ({"waiting": True, "refused": True, "failing": True}, Delay.FAILURES),
    ],
)
def test_one_that_will_be_late_is_given_what_it_needs_with_the_reason(seen: dict[str, bool], delay: Delay) -> None:
    found = outlook(RUNNING, 50, 0.5, 100, **(CALM | seen))

    assert found.delay is delay
    assert found.ends_s == 100 + 800 / 0.5
    assert found.needed == 9, "800 lines of 10 s in 900 of the 1,000 s that are left"


def test_a_batch_without_progress_never_ends() -> None:
    assert outlook(RUNNING, 0, 0.0, 100, **CALM | {"waiting": True}) == Outlook(None, Delay.ROOM, 18)


def test_more_lines_than_are_left_are_never_needed() -> None:
    late = outlook(RUNNING, 99, 0.001, 1099, **CALM)
    assert late.needed == RANGE_LINES


def test_nothing_is_said_of_a_batch_that_does_not_run_or_was_not_measured() -> None:
    assert outlook(RUNNING, 0, None, 1099, **CALM) == Outlook()
    assert outlook(NEW_BATCH, 0, 0.0, 1099, **CALM) == Outlook()


def test_the_pace_is_that_of_the_last_minutes() -> None:
    pace = Pace()
    pace.note(0.0, 0)
    pace.note(MEASURED_FROM_S - 1, 3)
    assert pace.lines_per_s(86400) is None
    assert pace.lines_per_s(600) == pytest.approx(3 * RANGE_LINES / (MEASURED_FROM_S - 1)), "a short window"
    for second in range(120, 1000, 10):
        pace.note(float(second), 3 if second < 600 else 3 + (second - 600) // 10)

    assert pace.lines_per_s(86400) == pytest.approx(RANGE_LINES / 10, rel=0.05)
    pace.note(990 + 2 * MEASURED_FOR_S, 42)
    pace.note(990 + 3 * MEASURED_FOR_S, 42)
    assert pace.lines_per_s(86400) == 0.0
