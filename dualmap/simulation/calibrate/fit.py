"""Fitting step costs to measured times: least squares of relative errors, no cost below 0.

A prompt alone: ``prompt + steps · overhead + max(weights, token · n) of each step + pair · pairs``. A batch that
decodes: ``overhead + max(weights, token · batch) + sequence · batch + context · tokens of context``. What a decode step
takes at least, overhead and weights together, is seen there; how it divides shows in the prompts, where a larger share
of weights makes short chunks free. The share with the least error is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.simulation.engine.least_squares import non_negative
from dualmap.simulation.engine.step_time import StepCosts, attention_pairs

_SHARES: Final = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9)
"""Shares of the least decode step that reading the weights may take."""
_LEAST: Final = 1e-12
_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Time to first token of a prompt alone on the engine."""

    prompt_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Time of one decode step of a batch."""

    sequences: int
    context_tokens: int
    """Context tokens of all sequences together."""
    step_s: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """Step costs, and how far they are from what was measured."""

    costs: StepCosts
    prefill_error: float
    """Mean relative error of the times to first token."""
    decode_error: float
    """Relative error of the decode steps."""


def fit_costs(prefills: Sequence[PrefillTime], decodes: Sequence[DecodeTime], budget_tokens: int) -> Fitted:
    """The step costs that explain the measurements best.

    Raises:
        ValueError: there are too few of them.
    """
    if len({each.prompt_tokens for each in prefills}) < 3 or len({each.sequences for each in decodes}) < 2:
        raise ValueError(
            "at least three lengths of prompts and two batch sizes must be measured: calibrate again while the instance"
            " has no other work"
        )
    rows = [[1.0, float(each.sequences), float(each.context_tokens)] for each in decodes]
    least_s, sequence_s, context_s = non_negative(rows, [each.step_s for each in decodes])
    fits = [_prefill_fit(prefills, least_s * (1 - share), least_s * share, budget_tokens) for share in _SHARES]
    _, token_s, pair_s, prompt_s, share = min(
        (error, *costs, share) for (error, costs), share in zip(fits, _SHARES, strict=True)
    )
    # If no weights hide it, a decoding token costs what a prompt's does, and is part of the measured slope.
    hidden = share > 0
    costs = StepCosts(
        overhead_s=least_s * (1 - share),
        weights_s=least_s * share,
        token_s=max(_LEAST, token_s),
        attention_pair_s=pair_s,
        sequence_s=sequence_s if hidden else max(0.0, sequence_s - token_s),
        context_token_s=context_s,
        prompt_s=prompt_s,
    )
    prefill = [(costs.prefill_s(each.prompt_tokens, budget_tokens), each.ttft_s) for each in prefills]
    decode = [(costs.step_s(0, 0, each.sequences, each.context_tokens), each.step_s) for each in decodes]
    return Fitted(costs, _error(prefill), _error(decode))


def _prefill_fit(
    prefills: Sequence[PrefillTime], overhead_s: float, weights_s: float, budget_tokens: int
) -> tuple[float, tuple[float, float, float]]:
    """Error, and costs of a token, a pair and a prompt. Chunks that the weights outweigh cost no tokens; which these
    are follows from the costs, so both are found in turns."""
    token_s = pair_s = prompt_s = 0.0
    error = float("inf")
    for _ in range(_ROUNDS):
        rows, rests = [], []
        for each in prefills:
            paid, bound, pairs, steps = _chunks(each.prompt_tokens, budget_tokens, token_s, weights_s)
            rows.append([float(paid), float(pairs), 1.0])
            rests.append(each.ttft_s - steps * overhead_s - bound * weights_s)
        scales = [each.ttft_s for each in prefills]
        token_s, pair_s, prompt_s = non_negative(rows, rests, scales)
        costs = StepCosts(overhead_s, weights_s, token_s, pair_s, 0.0, 0.0, prompt_s)
        error = _error([(costs.prefill_s(each.prompt_tokens, budget_tokens), each.ttft_s) for each in prefills])
    return error, (token_s, pair_s, prompt_s)


def _chunks(prompt_tokens: int, budget_tokens: int, token_s: float, weights_s: float) -> tuple[int, int, int, int]:
    """Tokens that are paid for, steps bound by the weights, attention pairs, steps."""
    paid = bound = pairs = steps = 0
    for start in range(0, prompt_tokens, budget_tokens):
        chunk = min(budget_tokens, prompt_tokens - start)
        steps += 1
        pairs += attention_pairs(start, chunk)
        if weights_s > 0 and token_s > 0 and token_s * chunk < weights_s:
            bound += 1
        else:
            paid += chunk
    return paid, bound, pairs, steps


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(abs(modelled - measured) / measured for modelled, measured in pairs) / len(pairs)
