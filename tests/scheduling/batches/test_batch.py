"""States of a batch, and its ranges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.batches.batch import (
    RANGE_LINES,
    BatchTransitionError,
    Progress,
    RangeDone,
    Status,
)
from tests.support.batches import NEW_BATCH as BATCH


def test_a_batch_goes_from_state_to_state_and_notes_when() -> None:
    over = BATCH.entered(Status.IN_PROGRESS, 110).entered(Status.FINALIZING, 150).entered(Status.COMPLETED, 160)

    assert over.is_over
    assert over.entered_s == {Status.IN_PROGRESS: 110, Status.FINALIZING: 150, Status.COMPLETED: 160}


@pytest.mark.parametrize("status", Status)
def test_a_batch_that_is_over_stays_so(status: Status) -> None:
    for ended in (Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED):
        with pytest.raises(BatchTransitionError):
            replace(BATCH, status=ended).entered(status, 1)


def test_a_batch_that_is_cancelled_before_it_was_planned_is_over_at_once() -> None:
    assert BATCH.cancelled(110).status is Status.CANCELLED
    assert BATCH.entered(Status.IN_PROGRESS, 110).cancelled(120).status is Status.CANCELLING
    with pytest.raises(BatchTransitionError):
        BATCH.entered(Status.IN_PROGRESS, 110).entered(Status.FINALIZING, 115).cancelled(120)


def test_ranges_cover_every_line_once() -> None:
    for lines in (1, RANGE_LINES, RANGE_LINES + 1, 10 * RANGE_LINES - 1):
        batch = replace(BATCH, lines=lines)
        assert [line for number in range(batch.ranges) for line in batch.lines_of(number)] == [*range(lines)]


def test_progress_is_the_sum_of_the_ranges_that_are_done() -> None:
    batch = replace(BATCH, lines=RANGE_LINES + 1)
    progress = Progress({1: RangeDone("a", 1, 0)})
    assert not progress.is_whole(batch)

    progress = Progress({1: RangeDone("a", 1, 0), 0: RangeDone("b", RANGE_LINES - 2, 2)})

    assert progress.is_whole(batch)
    assert (progress.completed, progress.failed) == (RANGE_LINES - 1, 2)
