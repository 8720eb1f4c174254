from __future__ import annotations

from dualmap.scheduling.estimates.ttft import compute_s, expected_ttft_s, queueing_s, stall_s
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState


def load(*, pending: int = 0, deferred: int = 0, stalled_s: float = 0.0) -> InstanceLoad:
    return InstanceLoad(
        "a",
        InstanceState.READY,
        pending_tokens=pending,
        deferred_tokens=deferred,
        prefill_tokens_per_s=2000.0,
        stalled_s=stalled_s,
    )


def test_ttft_is_queueing_plus_computing_through_the_prefill_rate() -> None:
    busy = load(pending=4000)

    assert queueing_s(busy) == 2.0
    assert compute_s(busy, 1000) == 0.5
    assert expected_ttft_s(busy, 1000) == 2.5


def test_nobody_queues_behind_deferred_work() -> None:
    assert queueing_s(load(pending=4000, deferred=3000)) == 0.5


def test_a_decode_bottleneck_adds_its_silence_once_it_is_long_enough() -> None:
    assert expected_ttft_s(load(pending=2000, stalled_s=2.9), 0) == 1.0
    assert expected_ttft_s(load(pending=2000, stalled_s=3.0), 0) == 4.0
    assert expected_ttft_s(load(pending=2000, stalled_s=1.5), 0, decode_stall_s=1.0) == 2.5
    assert (stall_s(load(stalled_s=2.9)), stall_s(load(stalled_s=7.0))) == (0.0, 7.0)
