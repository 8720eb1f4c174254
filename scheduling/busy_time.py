"""Time in which an engine was busy with prefills, as first tokens show it.

An engine was busy with a prefill from the later of the prefill's dispatch and the former one's end until its own end.
Prefills that one step computed together end together, and one that ends leaves a part of its last step to the next. So
prefills that follow each other without a gap are taken together: their total time is right, even if single ones are
not.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.latency import TtftParts, attention_pairs
from scheduling.values import value

MOST_STEPS = 8
"""Full steps that are taken together. What the edges take from others, and give to them, is little against so many."""
SAME_STEP_MS = 8
"""First tokens that come so close were computed in one step; less than a step takes."""


@value
class PrefillSample:
    """What one first token shows. Times are the store's."""

    uncached_tokens: int
    cached_tokens: int
    context_tokens: int
    """Expected context of the instance's running requests, its own included."""
    dispatched_ms: int
    first_token_ms: int
    previous_ms: int
    """First token before this one on the instance, of any request; 0 if there was none."""
    ttft_ms: int = 0
    parts: TtftParts | None = None
    """What the TTFT was expected from; None if it says little of that: retried, moved or past its deadline."""


@value
class BusyTime:
    """Prefills that followed each other without a gap."""

    tokens: int = 0
    """Uncached."""
    pairs: float = 0.0
    """That attention looked at."""
    context_tokens: float = 0.0
    """Running context, once for each of ``tokens``."""
    ends: int = 0
    """Steps in which prefills ended."""
    busy_s: float = 0.0
    ended_ms: int = 0

    @classmethod
    def of(cls, sample: PrefillSample) -> BusyTime:
        busy_ms = max(0, sample.first_token_ms - max(sample.previous_ms, sample.dispatched_ms))
        return cls(
            tokens=sample.uncached_tokens,
            pairs=attention_pairs(sample.uncached_tokens, sample.cached_tokens),
            context_tokens=float(sample.uncached_tokens * sample.context_tokens),
            ends=1,
            busy_s=busy_ms / 1000,
            ended_ms=sample.first_token_ms,
        )

    @classmethod
    def from_floats(cls, floats: Sequence[float]) -> BusyTime:
        """The busy time that ``floats`` gave."""
        tokens, pairs, context_tokens, ends, busy_s, ended_ms = floats
        return cls(int(tokens), pairs, context_tokens, int(ends), busy_s, int(ended_ms))

    def floats(self) -> tuple[float, ...]:
        return (
            float(self.tokens),
            self.pairs,
            self.context_tokens,
            float(self.ends),
            self.busy_s,
            float(self.ended_ms),
        )

    def continues_in(self, sample: PrefillSample, step_tokens: float) -> bool:
        """Whether the sample's prefill followed without a gap, and there is room for it."""
        if not self.ends or sample.previous_ms != self.ended_ms or sample.dispatched_ms > sample.previous_ms:
            return False
        return self.tokens < MOST_STEPS * step_tokens or sample.first_token_ms - self.ended_ms <= SAME_STEP_MS

    def with_next(self, other: BusyTime) -> BusyTime:
        """Both together; ``other`` is the later one."""
        same_step = other.ended_ms - self.ended_ms <= SAME_STEP_MS
        return BusyTime(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.context_tokens + other.context_tokens,
            self.ends + (0 if same_step else other.ends),
            self.busy_s + other.busy_s,
            other.ended_ms,
        )
