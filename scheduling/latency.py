"""How long an instance takes: the time of a prefill, and the expected time to first token.

An engine computes in steps under a token budget. A prefill of ``n`` uncached tokens takes

    step_s + token_s · n + pair_s · pairs + context_token_s · context · steps

where pairs are those that attention looks at (each new token with every token before it), ``context`` is the running
requests' contexts, which every step reads to decode, and ``steps`` is one for the step under way and ``n`` over the
budget. ``step_s`` is counted once for each step in which prefills end, as those are not full; what full steps cost
whatever they compute is a part of ``token_s``. So the fixed cost of a step, the rate, attention and decoding are told
apart, and prompts of one length say what those of another take.

The TTFT adds the wait: queueing behind the prefills ahead, sharing steps with them (*joining*), and what placements
cannot know and samples show, a constant and a part that grows with the context in KV memory.
``scheduling.latency_model`` learns all of it from first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import isfinite
from typing import NamedTuple

from scheduling.instance import InstanceSpec
from scheduling.values import value

TYPICAL_PROMPT_TOKENS = 8192
"""Prompt whose prefill, alone on the instance, has the configured rate."""
PRIOR_STEP_SHARE, PRIOR_STEP_S = 0.1, 0.025
"""Fixed cost of a step before anything is learned: this share of a full step, and no more than so much."""
MOST_STEP_TOKENS = 16_384
"""Largest token budget that is assumed; a dispatch window without a limit says nothing about it."""
PRIOR_ATTENTION = 3e-5
"""Pairs of tokens in time of one token, before anything is learned. Dense models of 7B to 70B have 2e-5 to 4e-5 (from
their configuration: 4 operations per layer, width and pair against 2 per parameter and token)."""
PRIOR_DECODING = 8e-4
"""Context tokens, read once, in time of one token's prefill, likewise."""


class TtftParts(NamedTuple):
    """What a TTFT is expected from when a request is placed; integers, so that no store rounds them."""

    queueing_ms: int
    """Prefill of the work ahead, see ``scheduling.ttft.remaining_queueing_s``."""
    compute_ms: int
    """The own prefill, see ``Latency.compute_s``."""
    joining_ms: int
    """The part of a step that prefills ahead fill."""
    context_tokens: int
    """Expected context of the instance's running requests, see ``InstanceLoad.context_tokens``."""


class TtftSlopes(NamedTuple):
    """An expected TTFT as a linear function of the counts that a store keeps, exact where it was taken."""

    constant_s: float
    ahead_token_s: float
    """Per token of prefill ahead."""
    uncached_token_s: float
    """Per own token."""
    context_token_s: float
    """Per token of running context."""

    def ttft_s(self, ahead_tokens: int, uncached_tokens: int, context_tokens: int) -> float:
        return (
            self.constant_s
            + self.ahead_token_s * ahead_tokens
            + self.uncached_token_s * uncached_tokens
            + self.context_token_s * context_tokens
        )


@value
class Latency:
    """What is known of one instance's times; replicas expect by it."""

    step_tokens: float
    """Token budget of a step."""
    step_s: float
    """Fixed cost of a step, and the wait for the one under way."""
    token_s: float
    """Per uncached token: its share of the linear layers."""
    pair_s: float
    """Per pair of an uncached token and a token before it."""
    context_token_s: float
    """Per step and token of running context: its share of decoding."""
    pairs_per_token: float = TYPICAL_PROMPT_TOKENS / 2
    """Of recent prefills."""
    typical_context_tokens: float = 0.0
    """Running context during recent prefills."""
    queueing_weight: float = 1.0
    """Seconds of wait for each second of queueing."""
    joining_weight: float = 0.5
    """Seconds of wait for each second of steps shared with the work ahead."""
    waiting_s: float = 0.0
    """Wait independent of the instance's load: for requests that come just after, which share the step."""
    waiting_context_s: float = 0.0
    """Wait per token of running context: for KV memory."""

    @classmethod
    def prior(cls, spec: InstanceSpec) -> Latency:
        """What is believed before the first prefill: a prompt of ``TYPICAL_PROMPT_TOKENS`` has the configured rate."""
        step_tokens = min(max(1.0, spec.dispatch_window_tokens / 2), MOST_STEP_TOKENS)
        mean_s = 1.0 / spec.prefill_tokens_per_s
        pairs_per_token = TYPICAL_PROMPT_TOKENS / 2
        step_s = min(PRIOR_STEP_SHARE * mean_s * step_tokens, PRIOR_STEP_S)
        token_s = (mean_s - step_s / step_tokens) / (1.0 + PRIOR_ATTENTION * pairs_per_token)
        return cls(
            step_tokens=step_tokens,
            step_s=step_s,
            token_s=token_s,
            pair_s=PRIOR_ATTENTION * token_s,
            context_token_s=PRIOR_DECODING * mean_s,
        )

    @classmethod
    def from_floats(cls, floats: Sequence[float]) -> Latency:
        """The latency that ``floats`` gave. Raises ValueError if they are not as many, or not finite."""
        if len(floats) != len(fields(cls)) or not all(map(isfinite, floats)):
            raise ValueError(f"a latency has {len(fields(cls))} finite numbers, not {list(floats)}")
        return cls(*floats)

    def floats(self) -> tuple[float, ...]:
        """All of it, in the order of the fields."""
        return tuple([getattr(self, field.name) for field in fields(self)])

    @property
    def tokens_per_s(self) -> float:
        """Rate of prefills that queue, short or long, with the recent running context."""
        return 1.0 / self.mean_token_s(self.typical_context_tokens)

    def mean_token_s(self, context_tokens: float) -> float:
        """Seconds per token where prefills queue, with so much running context: some end in every step."""
        step_s = self.step_s + self.context_token_s * context_tokens
        return self.token_s + self.pair_s * self.pairs_per_token + step_s / self.step_tokens

    def compute_s(self, uncached_tokens: int, cached_tokens: int, context_tokens: int) -> float:
        """Time of a prefill that has the instance's prefill for itself, the wait for the step under way included."""
        steps = 1.0 + uncached_tokens / self.step_tokens
        return (
            self.step_s
            + self.token_s * uncached_tokens
            + self.pair_s * attention_pairs(uncached_tokens, cached_tokens)
            + self.context_token_s * context_tokens * steps
        )

    def parts(
        self, queueing_s: float, ahead_tokens: int, uncached_tokens: int, cached_tokens: int, context_tokens: int
    ) -> TtftParts:
        """What the TTFT of a request is expected from.

        Args:
            queueing_s: of a request that would queue last, see ``scheduling.ttft.remaining_queueing_s``.
            ahead_tokens: pending tokens that it waits for, those of the prefill under way counted in full.
        """
        joining_s = min(self.step_tokens, ahead_tokens) * self.mean_token_s(context_tokens)
        return TtftParts(
            round(1000 * queueing_s),
            round(1000 * self.compute_s(uncached_tokens, cached_tokens, context_tokens)),
            round(1000 * joining_s),
            context_tokens,
        )

    def expected_ttft_s(self, parts: TtftParts) -> float:
        """The expected TTFT; never negative."""
        ttft_s = (
            self.waiting_s
            + self.waiting_context_s * parts.context_tokens
            + self.queueing_weight * parts.queueing_ms / 1000
            + self.joining_weight * parts.joining_ms / 1000
            + parts.compute_ms / 1000
        )
        return max(0.0, ttft_s)

    def slopes(
        self, queueing_s: float, ahead_tokens: int, uncached_tokens: int, cached_tokens: int, context_tokens: int
    ) -> TtftSlopes:
        """The expected TTFT as a linear function around these counts, arguments as of ``parts``.

        A token more of prefill ahead takes its whole time. An own token more is one less in the cache.
        """
        mean_token_s = self.mean_token_s(context_tokens)
        joins = self.joining_weight if ahead_tokens < self.step_tokens else 0.0
        own_s = self.token_s + self.pair_s * cached_tokens + self.context_token_s * context_tokens / self.step_tokens
        joined_tokens = min(self.step_tokens, ahead_tokens)
        others = self.queueing_weight * ahead_tokens + self.joining_weight * joined_tokens
        steps = 1.0 + (uncached_tokens + others) / self.step_tokens
        slopes = TtftSlopes(
            0.0,
            (self.queueing_weight + joins) * mean_token_s,
            own_s,
            self.waiting_context_s + self.context_token_s * steps,
        )
        parts = self.parts(queueing_s, ahead_tokens, uncached_tokens, cached_tokens, context_tokens)
        linear_s = slopes.ttft_s(ahead_tokens, uncached_tokens, context_tokens)
        return slopes._replace(constant_s=self.expected_ttft_s(parts) - linear_s)


def attention_pairs(uncached_tokens: int, cached_tokens: int) -> float:
    """Pairs of tokens that the attention of a prefill looks at."""
    return uncached_tokens * (cached_tokens + uncached_tokens / 2)
