"""The expected time to first token: TTFT(r, i) = Tq(r, i) + Tc(r, i).

Source: DualMap (ICLR 2026). Queueing time comes from the instance's pending tokens, compute time from the
request's uncached tokens, both through the instance's learned prefill rate. Decode bottleneck: an engine that
ran out of KV memory may decode for seconds without finishing a prefill. Once it has finished none for
``decode_stall_s`` with work queued, that time is added to the queueing time of everything queued on it.

The features that placements are weighed by (``scheduling.estimates.weights``) are made of the same three terms.
"""

from __future__ import annotations

from dualmap.scheduling.estimates.adapters import PRIOR_ANSWER_S
from dualmap.scheduling.settings import DECODE_STALL_S
from dualmap.scheduling.state.instance import InstanceLoad


def ahead_s(instance: InstanceLoad, overtaken_tokens: int) -> float:
    """Time to prefill what a request waits for: all that is pending and not overtaken by it."""
    return (instance.pending_tokens - overtaken_tokens) / instance.prefill_tokens_per_s


def compute_s(instance: InstanceLoad, uncached_tokens: int) -> float:
    """Tc: the time to prefill the request's own uncached tokens."""
    return uncached_tokens / instance.prefill_tokens_per_s


def counted_stall_s(stalled_s: float, stall_from_s: float) -> float:
    """The decode-bottleneck correction in seconds; 0 while prefills still finish."""
    return stalled_s if stalled_s >= stall_from_s else 0.0


def stall_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """The decode-bottleneck correction of an instance."""
    return counted_stall_s(load.stalled_s, decode_stall_s)


def queueing_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """Tq of a request that would queue last."""
    return ahead_s(load, load.overtaken_tokens) + counted_stall_s(load.stalled_s, decode_stall_s)


def expected_ttft_s(load: InstanceLoad, uncached_tokens: int, decode_stall_s: float = DECODE_STALL_S) -> float:
    """TTFT of a request that would queue last on the instance."""
    host_s, disk_s, turns = load.adapter
    adapter_s = host_s + disk_s + turns * PRIOR_ANSWER_S
    return queueing_s(load, decode_stall_s) + compute_s(load, uncached_tokens) + load.tiers.load_s + adapter_s
