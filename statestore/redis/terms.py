"""Constants of the scripts: they are the same in every call of a process."""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.queue_order import CALM_WINDOWS, LONG_SHARE, PLAN_LIMIT
from scheduling.settings import SchedulingSettings
from statestore.leases import FIRST_LEASE_MS
from statestore.memory.prefix_index import LEAST_LOADED
from statestore.memory.state import SAMPLE_LOG
from statestore.redis.kv_events import CONFIRMED_STAMP


def terms_of(scheduling: SchedulingSettings) -> Mapping[str, float]:
    return {
        "kv_weight_s": scheduling.kv_weight_s,
        "stall_from_s": scheduling.decode_stall_s,
        "plan_limit": PLAN_LIMIT,
        "calm_windows": CALM_WINDOWS,
        "long_share": LONG_SHARE,
        "least_loaded": LEAST_LOADED,
        "first_lease_ms": FIRST_LEASE_MS,
        "arrivals": scheduling.hotness_window_requests,
        "samples": scheduling.prefix_samples,
        "taught": SAMPLE_LOG,
        "confirmed": CONFIRMED_STAMP,
    }
