"""Settings of a sped-up fleet."""

from __future__ import annotations

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.emulator.time_scale import scaled_scheduling

SETTINGS = SchedulingSettings(
    slo_ttft_s=5.0,
    slo_ttft_s_per_1k_tokens=0.2,
    slo_ttft_max_s=30.0,
    max_hold_s=300.0,
    max_deferred_s=30.0,
)


def test_engine_seconds_become_seconds_of_the_clock_and_nothing_else_changes() -> None:
    scaled = scaled_scheduling(SETTINGS, 10.0)
    assert (scaled.slo_ttft_s, scaled.hotness_window_s, scaled.decode_stall_s) == pytest.approx((0.5, 12.0, 0.3))
    assert (scaled.max_hold_s, scaled.max_deferred_s, scaled.kv_weight_s) == pytest.approx((30.0, 3.0, 0.4))
    assert (scaled.slo_ttft_s_per_1k_tokens, scaled.slo_ttft_max_s) == pytest.approx((0.02, 3.0))
    changed = {"slo_ttft_s", "max_hold_s", "max_deferred_s", "time_scale"}
    changed |= {"slo_ttft_s_per_1k_tokens", "slo_ttft_max_s"}
    assert scaled.model_dump(exclude=changed) == SETTINGS.model_dump(exclude=changed)


def test_at_the_clock_s_own_pace_settings_stay_as_they_are() -> None:
    assert scaled_scheduling(SETTINGS, 1.0) is SETTINGS
