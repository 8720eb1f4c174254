"""How long one engine step takes, from first principles.

A step computes all its tokens in one forward pass. Its linear layers are bound by the slower of reading every weight
once and multiplying for every token (the roofline); attention is bound by arithmetic in prefill and by reading the KV
cache in decode. The terms add up, as layers run one after the other:

    overhead + max(weights, token · (prefill + decode tokens)) + pair · prefill pairs
             + sequence · decoding sequences + context · tokens of their context + prompt · prompts that end
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


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


def attention_pairs(context_tokens: int, chunk_tokens: int) -> int:
    """Pairs that causal attention computes for a chunk after ``context_tokens`` of its own prompt."""
    return chunk_tokens * context_tokens + chunk_tokens * (chunk_tokens + 1) // 2
