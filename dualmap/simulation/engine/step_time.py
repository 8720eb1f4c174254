"""How long one engine step takes, from first principles.

A step computes all its tokens in one forward pass. Its linear layers are bound by the slower of reading every weight
once and multiplying for every token (the roofline); attention is bound by arithmetic in prefill and by reading the KV
cache in decode. The terms add up, as layers run one after the other:

    overhead + max(weights, token · (prefill + decode tokens)) + pair · prefill pairs
             + sequence · decoding sequences + context · tokens of their context + prompt · prompts that end

Kernels that were measured follow no roofline: a product of matrices costs in steps of its tiles, and a mixture of
experts reads the more experts the more tokens there are. ``TabledCosts`` has a table for the linear layers instead, and
constants for a step that prefills and for one that decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Coefficients of the step time, all in seconds."""

    overhead_s: float
    """Cost of a step: scheduling, launching, sampling, output handling on the host."""
    weights_s: float
    """Cost of a step: reading all weights from device memory once."""
    token_s: float
    """Cost of a computed token: arithmetic of the linear layers."""
    attention_pair_s: float
    """Cost of a pair of a prefilled token and a token that it attends to."""
    sequence_s: float
    """Cost of a decoding sequence: its share of host work and of small kernels."""
    context_token_s: float
    """Cost of a token of context that a decoding sequence reads from KV memory."""
    prompt_s: float = 0.0
    """Cost of a prompt whose prefill ends, besides steps: HTTP, tokenization, sending the first token."""

    def slowed(self, factor: float) -> StepCosts:
        """The costs with every step slower by this factor."""
        return StepCosts(**{name: factor * cost for name, cost in asdict(self).items()})

    def with_prefill_speed(self, factor: float) -> StepCosts:
        """The costs with prefill faster by this factor, and decoding as it was. Raises ValueError."""
        if not 0 < factor < float("inf"):
            raise ValueError(f"a speed must be above 0, found {factor}")
        return replace(self, token_s=self.token_s / factor, attention_pair_s=self.attention_pair_s / factor)

    def full_step_token_s(self, budget_tokens: int) -> float:
        """The least that a token costs in a step of at most so many, its attention and its sequence left out."""
        return self.token_s + self.overhead_s / budget_tokens

    def step_s(
        self, prefill_tokens: int, prefill_pairs: int, sequences: int, context_tokens: int, prompts: int = 0
    ) -> float:
        """Time of one step that mixes chunks of prompts with decoding sequences."""
        return (
            self.overhead_s
            + max(self.weights_s, self.token_s * (prefill_tokens + sequences))
            + self.attention_pair_s * prefill_pairs
            + self.sequence_s * sequences
            + self.context_token_s * context_tokens
            + self.prompt_s * prompts
        )

    def prefill_s(self, prompt_tokens: int, budget_tokens: int) -> float:
        """Time to prefill one prompt alone, in chunks of the token budget."""
        total_s = self.prompt_s
        for start in range(0, prompt_tokens, budget_tokens):
            chunk = min(budget_tokens, prompt_tokens - start)
            total_s += self.step_s(chunk, attention_pairs(start, chunk), 0, 0)
        return total_s


@dataclass(frozen=True, slots=True)
class TabledCosts(StepCosts):
    """Step costs whose linear layers are a table:

    overhead + linear[prefill + decode tokens] + pair · prefill pairs + chunk, if there are prefill tokens
             + sequence · decoding sequences + context · tokens of their context + decode, if there are sequences
             + prompt · prompts that end
    """

    _: KW_ONLY
    linear_s: tuple[float, ...]
    """Cost of the linear layers by tokens of the step, from none on. Each token more than the table has costs
    ``token_s``; ``weights_s`` is the cost of one token."""
    chunk_s: float = 0.0
    """Cost of a step that prefills, besides its tokens and pairs."""
    decode_s: float = 0.0
    """Cost of a step that decodes, besides its sequences and their context."""

    def slowed(self, factor: float) -> TabledCosts:
        others = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "linear_s"}
        linear_s = tuple(factor * cost for cost in self.linear_s)
        return TabledCosts(**{name: factor * cost for name, cost in others.items()}, linear_s=linear_s)

    def with_prefill_speed(self, factor: float) -> TabledCosts:
        """The costs with so many times the tokens in the same time; one token costs what it did. Raises ValueError."""
        if not 0 < factor < float("inf"):
            raise ValueError(f"a speed must be above 0, found {factor}")
        tokens = (max(min(n, 1), n / factor) for n in range(len(self.linear_s)))
        return replace(
            self,
            linear_s=tuple(map(self._linear_s, tokens)),
            token_s=self.token_s / factor,
            attention_pair_s=self.attention_pair_s / factor,
        )

    def full_step_token_s(self, budget_tokens: int) -> float:
        return min((self.overhead_s + self._linear_s(n)) / n for n in range(1, budget_tokens + 1))

    def step_s(
        self, prefill_tokens: int, prefill_pairs: int, sequences: int, context_tokens: int, prompts: int = 0
    ) -> float:
        tokens, linear_s = prefill_tokens + sequences, self.linear_s
        step_s = self.overhead_s + (linear_s[tokens] if tokens < len(linear_s) else self._linear_s(tokens))
        if prefill_tokens:
            step_s += self.chunk_s + self.attention_pair_s * prefill_pairs + self.prompt_s * prompts
        if sequences:
            step_s += self.decode_s + self.sequence_s * sequences + self.context_token_s * context_tokens
        return step_s

    def _linear_s(self, tokens: float) -> float:
        """The linear layers, between two entries of the table and behind its last one, too."""
        last = len(self.linear_s) - 1
        if tokens >= last:
            return self.linear_s[last] + self.token_s * (tokens - last)
        below = int(tokens)
        return self.linear_s[below] + (tokens - below) * (self.linear_s[below + 1] - self.linear_s[below])


Knots = Sequence[tuple[int, float]]
"""Points of a table, between which it is linear; the first is that of one token."""


def knots_of(table: Sequence[float], error: float) -> Knots:
    """The fewest knots, each behind the last as far as possible, that are off by no more than this share."""
    knots = [1]
    while (at := knots[-1]) < len(table) - 1:
        least, most, reached = float("-inf"), float("inf"), at + 1
        for tokens in range(at + 1, len(table)):
            slope = (table[tokens] - table[at]) / (tokens - at)
            if least <= slope <= most:
                reached = tokens
            least = max(least, (table[tokens] * (1 - error) - table[at]) / (tokens - at))
            most = min(most, (table[tokens] * (1 + error) - table[at]) / (tokens - at))
            if least > most:
                break
        knots.append(reached)
    return [(tokens, table[tokens]) for tokens in knots]


def table_of(knots: Knots) -> tuple[float, ...]:
    """The table with an entry for each number of tokens, from none on. Raises ValueError."""
    tokens = [at for at, _ in knots]
    if not tokens or tokens[0] != 1 or any(b <= a for a, b in pairwise(tokens)):
        raise ValueError("a table has ascending numbers of tokens, from 1 on")
    table = [0.0]
    for number in range(1, tokens[-1] + 1):
        place = bisect_left(tokens, number)
        (end, cost), (start, former) = knots[place], knots[max(0, place - 1)]
        table.append(cost if end == number else former + (number - start) / (end - start) * (cost - former))
    return tuple(table)


def attention_pairs(context_tokens: int, chunk_tokens: int) -> int:
    """Pairs that causal attention computes for a chunk after ``context_tokens`` of its own prompt."""
    return chunk_tokens * context_tokens + chunk_tokens * (chunk_tokens + 1) // 2
