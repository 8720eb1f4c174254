"""The expected time to first token: TTFT(r, i) = Tq(r, i) + Tc(r, i).

Source: DualMap (ICLR 2026). Queueing time comes from the instance's pending tokens, compute time from the
request's uncached tokens, both through the instance's learned prefill rate. Decode bottleneck: an engine that
ran out of KV memory may decode for seconds without finishing a prefill. Once it has finished none for
``decode_stall_s`` with work queued, that time is added to the queueing time of everything queued on it.
"""

from __future__ import annotations

from dualmap.scheduling.settings import DECODE_STALL_S
from dualmap.scheduling.state.instance import InstanceLoad


def stall_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """The decode-bottleneck correction in seconds; 0 while prefills still finish."""
    return load.stalled_s if load.stalled_s >= decode_stall_s else 0.0


def queueing_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """Tq of a request that would queue last: the time to prefill all that is pending and not overtaken by it."""
    stalled_s = load.stalled_s
    waiting_s = (load.pending_tokens - load.overtaken_tokens) / load.prefill_tokens_per_s
    return waiting_s + stalled_s if stalled_s >= decode_stall_s else waiting_s


def compute_s(load: InstanceLoad, uncached_tokens: int) -> float:
    """Tc: the time to prefill the request's own uncached tokens."""
    return uncached_tokens / load.prefill_tokens_per_s


def expected_ttft_s(load: InstanceLoad, uncached_tokens: int, decode_stall_s: float = DECODE_STALL_S) -> float:
    """TTFT of a request that would queue last on the instance."""
    return queueing_s(load, decode_stall_s) + compute_s(load, uncached_tokens)
