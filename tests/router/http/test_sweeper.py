from __future__ import annotations

import pytest

from dualmap.router.http.sweeper import Sweeper
from tests.router.http import kit


class Counting:
    def __init__(self, error: Exception | None = None) -> None:
        self.swept = 0
        self.error = error

    def sweep(self, now_s: float) -> None:
        self.swept += 1
        if self.error is not None:
            raise self.error


async def test_everything_registered_is_swept_and_one_error_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    sweeper, items = Sweeper(0.01), [Counting(RuntimeError("broken")), Counting()]
    for item in items:
        sweeper.add(item)
    await kit.eventually(lambda: all(item.swept > 2 for item in items))
    assert "broken" in caplog.text
    sweeper.close()


async def test_what_is_discarded_is_left_alone_and_an_empty_sweeper_sets_no_timer() -> None:
    sweeper, item = Sweeper(0.01), Counting()
    sweeper.add(item)
    await kit.eventually(lambda: item.swept > 0)
    sweeper.discard(item)
    await kit.eventually(lambda: sweeper._timer is None)
    swept = item.swept
    sweeper.add(item)
    await kit.eventually(lambda: item.swept > swept)
    timer = sweeper._timer
    assert timer is not None
    sweeper.close()
    assert timer.cancelled() and sweeper._timer is None and not len(sweeper)
