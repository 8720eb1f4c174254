"""One clock for a sped-up fleet: what its settings become when engines run faster than the clock.

Emulated instances with ``time_scale`` k live k engine seconds in a second. To the fleet, which lives by the clock,
they are instances that prefill k times faster; and whatever the scheduling settings state in seconds of an engine's
life is over k times sooner. Leases, health checks and network timeouts are about processes, not engines, and stay.
"""

from __future__ import annotations

from scheduling.instance import InstanceSpec
from scheduling.settings import SchedulingSettings
from simulation.settings import EmulatorSettings


def scaled_scheduling(settings: SchedulingSettings, time_scale: float) -> SchedulingSettings:
    """Scheduling settings in seconds of the clock, from those in engine seconds."""
    return settings.model_copy(
        update={
            "slo_ttft_s": settings.slo_ttft_s / time_scale,
            "hotness_window_s": settings.hotness_window_s / time_scale,
            "decode_stall_s": settings.decode_stall_s / time_scale,
        }
    )


def emulated_spec(settings: EmulatorSettings, instance_id: str, url: str) -> InstanceSpec:
    """What the fleet should know of one emulated instance: its rates as the clock sees them."""
    engine = settings.engine_config()
    return InstanceSpec(
        instance_id=instance_id,
        url=url,
        prefill_tokens_per_s=engine.prefill_tokens_per_s() * settings.time_scale,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        max_running_requests=engine.max_num_seqs,
    )
