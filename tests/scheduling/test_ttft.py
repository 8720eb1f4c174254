from __future__ import annotations

from scheduling.instance import InstanceLoad, InstanceState
from scheduling.ttft import compute_s, expected_ttft_s, queueing_s, stall_s, work_s


def load(*, pending: int = 0, stalled_s: float = 0.0) -> InstanceLoad:
    return InstanceLoad(
        "a", InstanceState.READY, pending_tokens=pending, prefill_tokens_per_s=2000.0, stalled_s=stalled_s
    )


def test_ttft_is_queueing_plus_computing_through_the_prefill_rate() -> None:
    busy = load(pending=4000)

    assert queueing_s(busy) == 2.0
    assert compute_s(busy, 1000) == 0.5
    assert expected_ttft_s(busy, 1000) == 2.5


def test_a_decode_bottleneck_adds_its_silence_once_it_is_long_enough() -> None:
    assert expected_ttft_s(load(pending=2000, stalled_s=2.9), 0) == 1.0
    assert expected_ttft_s(load(pending=2000, stalled_s=3.0), 0) == 4.0
    assert expected_ttft_s(load(pending=2000, stalled_s=1.5), 0, decode_stall_s=1.0) == 2.5
    assert (stall_s(load(stalled_s=2.9)), stall_s(load(stalled_s=7.0))) == (0.0, 7.0)


def test_work_is_what_queues_on_time_and_what_kv_memory_in_use_counts_for() -> None:
    assert work_s(3000, tokens_per_s=1000.0, kv_demand=0.5, kv_weight_s=4.0) == 3.0 + 2.0
    assert work_s(3000, tokens_per_s=1000.0, kv_demand=0.5, kv_weight_s=0.0) == 3.0
