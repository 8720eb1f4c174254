"""The expected time to first token: TTFT(r, i) = Tq(r, i) + Tc(r, i).

Source: DualMap (ICLR 2026). Queueing time comes from the instance's pending tokens, compute time from the
request's uncached tokens, both through the instance's learned prefill rate. Decode bottleneck: an engine that
ran out of KV memory may decode for seconds without finishing a prefill; once it has been silent for
``decode_stall_s`` with work queued, that silence is added to the queueing time of everything queued on it.
"""

from __future__ import annotations

from scheduling.instance import InstanceLoad
from scheduling.ttft_model import TtftFeatures, attention_million_pairs

DECODE_STALL_S = 3.0
"""Default of ``decode_stall_s``: the paper's T."""


def stall_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """The decode-bottleneck correction in seconds; 0 while prefills still finish."""
    return load.stalled_s if load.stalled_s >= decode_stall_s else 0.0


def queueing_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """Tq of a request that would queue last: the time to prefill all that is pending and not behind it."""
    stalled_s = load.stalled_s
    waiting_s = (load.pending_tokens - load.behind_tokens) / load.prefill_tokens_per_s
    return waiting_s + stalled_s if stalled_s >= decode_stall_s else waiting_s


def remaining_queueing_s(load: InstanceLoad, decode_stall_s: float = DECODE_STALL_S) -> float:
    """Tq less the progress of the prefill under way.

    Pending tokens are released when a prefill ends, so in the middle of a long one they overstate the wait by up to
    its whole length. The time since the last one ended tells how far it should have come; only what exceeds the
    time that all dispatched tokens need counts as a stall.
    """
    stalled_s, tokens_per_s = load.stalled_s, load.prefill_tokens_per_s
    dispatched_s = load.dispatched_tokens / tokens_per_s
    waiting_s = (load.pending_tokens - load.behind_tokens) / tokens_per_s
    if stalled_s <= dispatched_s:
        return waiting_s - stalled_s
    overdue_s = stalled_s - dispatched_s
    remaining_s = waiting_s - dispatched_s
    return remaining_s + overdue_s if overdue_s >= decode_stall_s else remaining_s


def work_s(on_time_tokens: int, tokens_per_s: float, kv_demand: float, kv_weight_s: float) -> float:
    """What an instance has to do, by which the lightest are found: the queueing time of its on-time work, and
    ``kv_weight_s`` for a KV memory's worth of context. The store keeps a Lua twin."""
    return on_time_tokens / tokens_per_s + kv_weight_s * kv_demand


def ttft_features(load: InstanceLoad, waiting_s: float, uncached_tokens: int, cached_tokens: int) -> TtftFeatures:
    """What an instance's model expects a TTFT from, and is taught with when the first token comes; ``waiting_s`` as by
    ``remaining_queueing_s``."""
    return TtftFeatures(
        int(1000 * waiting_s),
        int(1000 * compute_s(load, uncached_tokens)),
        attention_million_pairs(uncached_tokens, cached_tokens),
        load.context_tokens,
    )


def compute_s(load: InstanceLoad, uncached_tokens: int) -> float:
    """Tc: the time to prefill the request's own uncached tokens."""
    return uncached_tokens / load.prefill_tokens_per_s


def expected_ttft_s(load: InstanceLoad, uncached_tokens: int, decode_stall_s: float = DECODE_STALL_S) -> float:
    """TTFT of a request that would queue last on the instance."""
    return queueing_s(load, decode_stall_s) + compute_s(load, uncached_tokens)
