"""One clock for a sped-up fleet: its settings when engines run faster than the clock.

Emulated instances with ``time_scale`` k run k engine seconds in a second. To the fleet, which uses the clock, they are
instances that prefill k times faster, and all times of the scheduling settings that are engine seconds are k times
shorter. ``scheduling.time_scale`` makes constants in engine seconds shorter, too, and background jobs more frequent.
Leases, health checks and network timeouts are about processes, not engines, and stay.
"""

from __future__ import annotations

from dualmap.scheduling.settings import SchedulingSettings

_ENGINE_TIMES = (
    "slo_ttft_s",
    "slo_ttft_s_per_1k_tokens",
    "slo_ttft_max_s",
    "max_hold_s",
    "max_deferred_s",
)


def scaled_scheduling(settings: SchedulingSettings, time_scale: float) -> SchedulingSettings:
    """Scheduling settings in seconds of the clock, from those in engine seconds."""
    if time_scale == 1.0:
        return settings
    times = {name: getattr(settings, name) for name in _ENGINE_TIMES}
    scaled = {name: time / time_scale for name, time in times.items() if time is not None}
    return settings.model_copy(update={**scaled, "time_scale": time_scale})
