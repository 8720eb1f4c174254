"""How many requests of batches an instance takes beside those that somebody waits for.

Batches get room where the slowest interactive requests would hardly notice: where less than a step of the engine waits
to be prefilled, where memory is left for the contexts that interactive requests are about to bring, where the decode
batch is far from full, and where prompts of lines have not taken their part of the engine's time yet. An instance that
interactive requests have left alone for a while is used as a whole.

The rule looks at one instance at a moment; replicas apply it several times a second, each for its part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from dualmap.scheduling.batches.batch import Batch
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.values import value

MEMORY_PART: Final = 0.8
"""Part of the KV memory that is used at most with requests of batches. The rest is for those that come meanwhile."""
SEQUENCES_PART: Final = 0.095
"""Part of the sequences of an instance that requests of batches may be, beside interactive ones. Each one more makes
every step longer, for all who are answered there: with these the P99 of first tokens and of the time per token stay
within 5 % (``benchmarks/batch_lines.py``)."""
PREFILL_PART: Final = 0.15
"""Part of the time of an instance that long prompts of lines take at most, beside interactive requests. A step that
computes a prompt takes several times as long, for all who are answered there: long prompts that follow each other would
make every step such a one, and the median of the time per token six times as long."""
QUIET_S: Final = 20.0
"""Time without an interactive request after which an instance is used as a whole: about that of a line, so that few
lines have to be stopped when interactive requests come back."""
_LEARNED_PART: Final = 0.05


@value
class ExpectedLine:
    """What the next line of a batch is expected to take, from those before it."""

    context_tokens: float = 2000.0
    prefill_tokens: float = 500.0
    """Tokens of its prompt that are computed."""

    def learned(self, context_tokens: int, prefill_tokens: int) -> ExpectedLine:
        """What is expected once a line had these."""
        return replace(
            self,
            context_tokens=self.context_tokens + _LEARNED_PART * (context_tokens - self.context_tokens),
            prefill_tokens=self.prefill_tokens + _LEARNED_PART * (prefill_tokens - self.prefill_tokens),
        )


def taken_by(line: ExpectedLine, load: InstanceLoad) -> float:
    """The tokens of a line's prompt that keep further lines out for a while, see ``room_of``: those beyond a quarter of
    a step, which no client notices."""
    return max(0.0, line.prefill_tokens - load.dispatch_window_tokens // 8)


def worn_off(taken_tokens: float, load: InstanceLoad, passed_s: float, places: int = 1) -> float:
    """Tokens that lines have taken of an instance through one of several replicas, less those that a time gave back."""
    return max(0.0, taken_tokens - PREFILL_PART * load.prefill_tokens_per_s / places * passed_s)


@value
class Room:
    """The lines that an instance takes, of all replicas."""

    most: int = 0
    """Lines that it has at most; those above that leave, as far as they can continue elsewhere or later."""
    begins: int = 0
    """Lines that may begin now."""
    is_open: bool = False
    """A line that ends may be followed by another."""

    def share(self, place: int, places: int) -> int:
        """The part of ``begins`` of one of several replicas, so that the parts of all are ``begins``."""
        return self.begins // places + (place % places < self.begins % places)


def room_of(load: InstanceLoad, lines: int, quiet_s: float, line: ExpectedLine, taken_tokens: float = 0.0) -> Room:
    """The room on an instance that has so many lines.

    Args:
        quiet_s: time since an interactive request was last seen there.
        line: a further line.
        taken_tokens: what lines that were begun there have taken (``taken_by``), as far as it has not worn off.
    """
    if load.state is not InstanceState.READY:
        return Room()
    is_quiet = quiet_s >= QUIET_S
    most = load.max_running_requests if is_quiet else int(SEQUENCES_PART * load.max_running_requests)
    window = load.dispatch_window_tokens  # two steps of the engine
    ahead_tokens = load.pending_tokens if is_quiet else max(load.pending_tokens, taken_tokens)
    waiting = (window if is_quiet else window // 2) - ahead_tokens
    starting = max(int(waiting // max(1.0, line.prefill_tokens)), int(ahead_tokens == 0))
    memory_tokens = MEMORY_PART * load.kv_capacity_tokens - max(load.context_tokens, load.running_tokens)
    fitting = int(memory_tokens // max(1.0, line.context_tokens))
    begins = min(most - lines, starting, fitting)
    return Room(most, max(0, begins), begins >= 0 and starting > 0 and fitting > 0)


def in_turn(batches: Iterable[Batch], under_way: Mapping[str, int], weights: Mapping[str, float]) -> list[Batch]:
    """The order in which batches are given room: those first whose tenant has least ``under_way`` for its weight (1
    where none is given), and of these those whose windows end first."""

    def rank(batch: Batch) -> tuple[float, int]:
        return under_way.get(batch.tenant, 0) / weights.get(batch.tenant, 1.0), batch.expires_s

    return sorted(batches, key=rank)


def next_range(free: Sequence[int], ranges: int, place: int, places: int) -> int:
    """The position in ``free``, which is sorted and not empty, of the range that one of several instances runs next.

    Each instance begins at another part of a batch and goes on from there, so that it computes the common beginnings
    of its part alone: prompts that begin alike follow each other in a batch.
    """
    begin = ranges * place // places
    first = bisect_left(free, begin)
    return first if first < len(free) else 0
