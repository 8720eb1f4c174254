"""How many requests of batches an instance takes beside those that somebody waits for.

Batches get room where interactive requests would not notice: where little waits to be prefilled, where memory is left
for the contexts that interactive requests are about to bring, and where the decode batch is far from full. The rule
looks at one instance at a moment; replicas apply it several times a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dualmap.scheduling.state.instance import InstanceLoad, InstanceState

WAIT_PART: Final = 0.1
"""Part of the TTFT SLO that prefill work may take which already waits, where a batch adds more."""
MEMORY_PART: Final = 0.8
"""Part of the KV memory that is used at most with requests of batches. The rest is for those that come meanwhile."""
SEQUENCES_PART: Final = 0.1
"""Part of the sequences of an instance that may be running where a batch adds one. Each one more makes every step
longer, for all who are answered there: with half of the sequences the P99 of interactive first tokens rose by half
(``benchmarks/batch_lines.py``)."""


FIRST_LINE_TOKENS: Final = 2000
"""The context of a line, before any was answered."""
_LEARNED_PART: Final = 0.05


def learned_line_tokens(line_tokens: float, seen_tokens: int) -> float:
    """The context that a line is expected to have, once another one had ``seen_tokens``."""
    return line_tokens + _LEARNED_PART * (seen_tokens - line_tokens)


def room_of(load: InstanceLoad, slo_s: float, line_tokens: int) -> int:
    """Requests of batches that the instance takes beside what it has. ``line_tokens``: the context of one, expected."""
    if load.state is not InstanceState.READY:
        return 0
    if load.pending_tokens > WAIT_PART * slo_s * load.prefill_tokens_per_s:
        return 0
    sequences = int(SEQUENCES_PART * load.max_running_requests) - load.in_flight
    memory_tokens = MEMORY_PART * load.kv_capacity_tokens - max(load.context_tokens, load.running_tokens)
    return max(0, min(sequences, int(memory_tokens // max(1, line_tokens))))


def room_for_replica(loads: Iterable[InstanceLoad], *, slo_s: float, line_tokens: int, replicas: int) -> int:
    """Requests of batches that one of ``replicas`` may begin now: what room there is goes to all of them alike."""
    room = sum(room_of(load, slo_s, line_tokens) for load in loads)
    return -(-room // max(1, replicas))
