"""Settings of a sped-up fleet."""

from __future__ import annotations

import pytest

from scheduling.settings import SchedulingSettings
from simulation.settings import EmulatorSettings
from simulation.time_scale import emulated_spec, scaled_scheduling


def test_engine_seconds_become_seconds_of_the_clock() -> None:
    scaled = scaled_scheduling(SchedulingSettings(slo_ttft_s=5.0, hotness_window_s=120.0, decode_stall_s=3.0), 10.0)
    assert (scaled.slo_ttft_s, scaled.hotness_window_s, scaled.decode_stall_s) == pytest.approx((0.5, 12.0, 0.3))
    assert scaled.block_tokens == SchedulingSettings().block_tokens


def test_an_emulated_instance_is_described_by_its_engine_s_figures() -> None:
    settings = EmulatorSettings(time_scale=10.0, kv_capacity_tokens=500_000, max_num_seqs=64)
    spec = emulated_spec(settings, "i-1", "http://x")
    assert spec.prefill_tokens_per_s == pytest.approx(82_799, abs=1)
    assert (spec.kv_capacity_tokens, spec.max_running_requests) == (500_000, 64)
