"""Step costs from the times of measured kernels.

The linear layers are taken over as a table, by tokens of a step. Attention, which depends on more than that, gets
three coefficients for chunks of prompts (one for a step that has any, one a token, one a pair) and three for decoding
(one for a step that does, one a sequence, one a token of context), by least squares of relative errors over random
steps. The error is measured over other steps than those of the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dualmap.simulation.engine.least_squares import non_negative
from dualmap.simulation.engine.step_time import TabledCosts, attention_pairs, knots_of, table_of

LONGEST_STEP_TOKENS = 8192
MOST_SEQUENCES = 128
LONGEST_CONTEXT_TOKENS = 20_480
STEPS = 400
"""Random steps of a fit, and as many that check it."""
TABLE_ERROR = 0.002
"""How far a cost may be from the line between two knots of the table."""


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One step of an engine: a chunk of a prompt after cached tokens, and sequences that decode, all equally long."""

    prefill_tokens: int
    cached_tokens: int
    sequences: int
    context_tokens: int
    """Context of each sequence."""

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.sequences

    @property
    def kind(self) -> str:
        if not self.sequences:
            return "prefill"
        return "mixed" if self.prefill_tokens else "decode"

    def by(self, costs: TabledCosts) -> float:
        """Its time by these costs, seconds."""
        pairs = attention_pairs(self.cached_tokens, self.prefill_tokens)
        return costs.step_s(self.prefill_tokens, pairs, self.sequences, self.sequences * self.context_tokens)


class KernelTimes(Protocol):
    """Times of the kernels of one model on some cards, without what the host costs."""

    def linear_s(self, tokens: int) -> float:
        """All but attention and states, in a step of so many tokens."""

    def step_s(self, step: KernelStep) -> float:
        """All of a step."""


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of step times over random steps."""

    p90: float
    worst: float
    prefill_p90: float
    mixed_p90: float
    decode_p90: float


def random_steps(seed: int, kv_capacity_tokens: int, count: int = STEPS) -> list[KernelStep]:
    """Steps of 1 to 8,192 tokens and up to 128 sequences whose context KV memory holds: three of five mixed, one
    prefill alone, one decode alone. Sizes are spread evenly over their orders of magnitude."""
    chance = Random(seed)

    def between(least: int, most: int) -> int:
        return round(least * (most / least) ** chance.random()) if most > least else least

    steps = []
    for number in range(count):
        sequences = 0 if number % 5 == 3 else between(1, MOST_SEQUENCES)
        prefill = 0 if number % 5 == 4 else between(1, LONGEST_STEP_TOKENS - sequences)
        cached = between(64, LONGEST_CONTEXT_TOKENS) if prefill and chance.random() < 0.7 else 0
        room = max(64, kv_capacity_tokens // max(1, sequences))
        context = between(64, min(LONGEST_CONTEXT_TOKENS, room)) if sequences else 0
        steps.append(KernelStep(prefill, cached, sequences, context))
    return steps


def fit_kernels(kernels: KernelTimes, kv_capacity_tokens: int) -> TabledCosts:
    """The step costs of these kernels, without what the host costs."""
    table = [0.0, *(kernels.linear_s(tokens) for tokens in range(1, LONGEST_STEP_TOKENS + 1))]
    steps = random_steps(1, kv_capacity_tokens)
    times_s = [kernels.step_s(step) for step in steps]
    rows = [
        [
            float(step.prefill_tokens > 0),
            float(step.prefill_tokens),
            float(attention_pairs(step.cached_tokens, step.prefill_tokens)),
            float(step.sequences > 0),
            float(step.sequences),
            float(step.sequences * step.context_tokens),
        ]
        for step in steps
    ]
    rests_s = [time_s - table[step.tokens] for step, time_s in zip(steps, times_s, strict=True)]
    chunk_s, prefill_s, pair_s, decode_s, sequence_s, context_s = non_negative(rows, rests_s, times_s)
    # A prefilled token's own cost of attention joins the table, and what that adds for a sequence is taken off it.
    joined = [cost + prefill_s * tokens for tokens, cost in enumerate(table)]
    last = LONGEST_STEP_TOKENS
    return TabledCosts(
        overhead_s=0.0,
        weights_s=joined[1],
        token_s=max(0.0, (joined[last] - joined[last // 2]) / (last - last // 2)),
        attention_pair_s=pair_s,
        sequence_s=sequence_s - prefill_s,
        context_token_s=context_s,
        linear_s=table_of(knots_of(joined, TABLE_ERROR)),
        chunk_s=chunk_s,
        decode_s=decode_s,
    )


def fit_error(costs: TabledCosts, kernels: KernelTimes, kv_capacity_tokens: int) -> FitError:
    """How far the costs are off, over steps that the fit has not seen."""
    found: dict[str, list[float]] = {"prefill": [], "mixed": [], "decode": []}
    for step in random_steps(2, kv_capacity_tokens):
        time_s = kernels.step_s(step)
        found[step.kind].append(abs(step.by(costs) - time_s) / time_s)
    every = [error for errors in found.values() for error in errors]
    return FitError(_p90(every), max(every), _p90(found["prefill"]), _p90(found["mixed"]), _p90(found["decode"]))


def _p90(errors: Sequence[float]) -> float:
    return sorted(errors)[max(0, -(-9 * len(errors) // 10) - 1)]
