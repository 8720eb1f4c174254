"""The engine's clock."""

from __future__ import annotations

import pytest

from dualmap.simulation.emulator.clock import EngineClock


def test_engine_time_runs_faster_and_stands_still_while_paused() -> None:
    now_s = 100.0
    clock = EngineClock(lambda: now_s, time_scale=10.0)
    now_s = 101.0
    assert clock.now_s() == pytest.approx(10.0)
    assert clock.wall_delay_s(15.0) == pytest.approx(0.5)
    assert clock.wall_delay_s(5.0) == 0.0
    clock.pause()
    now_s = 150.0
    assert clock.paused
    assert clock.now_s() == pytest.approx(10.0)
    clock.resume()
    now_s = 150.5
    assert clock.now_s() == pytest.approx(15.0)
