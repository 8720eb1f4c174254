from __future__ import annotations

import pytest

from dualmap.router.http.deadlines import DeadlineChecks
from tests.router.http import kit


class Counting:
    def __init__(self, error: Exception | None = None) -> None:
        self.swept = 0
        self.error = error

    def check_deadlines(self, now_s: float) -> None:
        self.swept += 1
        if self.error is not None:
            raise self.error


async def test_everything_registered_is_swept_and_one_error_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    deadlines, items = DeadlineChecks(0.01), [Counting(RuntimeError("broken")), Counting()]
    for item in items:
        deadlines.add(item)
    await kit.eventually(lambda: all(item.swept > 2 for item in items))
    assert "broken" in caplog.text
    deadlines.close()


async def test_what_is_discarded_is_left_alone_and_an_empty_sweeper_sets_no_timer() -> None:
    deadlines, item = DeadlineChecks(0.01), Counting()
    deadlines.add(item)
    await kit.eventually(lambda: item.swept > 0)
    deadlines.discard(item)
    await kit.eventually(lambda: deadlines._timer is None)
    swept = item.swept
    deadlines.add(item)
    await kit.eventually(lambda: item.swept > swept)
    timer = deadlines._timer
    assert timer is not None
    deadlines.close()
    assert timer.cancelled() and deadlines._timer is None and not len(deadlines)
