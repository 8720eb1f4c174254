"""Requests for many adapters of one model: how often each is asked for falls by its rank.

Every adapter has a system prompt of its own, as a fine-tuned model's application has, so prefixes and adapters say the
same of where a request belongs. Prompts and answers are short: what a placement can save is loads of adapters.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from random import Random

from dualmap.simulation.workload.generators.draft import Draft
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 16.0
ADAPTERS = 256
"""Four times what eight instances with eight slots each have on the device."""
PREFIX_TOKENS = MOONCAKE_BLOCK_TOKENS
QUESTION_TOKENS = QuantileTable(((0, 20), (0.5, 300), (1, 2000)))
ANSWER_TOKENS = QuantileTable(((0, 10), (0.5, 150), (1, 600)))


LEAST_RANK = 8


def adapters(requests: int, seed: int, count: int = ADAPTERS, skew: float = 1.0, rank: int = 0) -> Trace:
    """Adapter number k is asked for in proportion to k ** -skew; with a skew of 0 all are equally popular. Their ranks
    are powers of two from ``LEAST_RANK`` to ``rank``, as many of each; with a ``rank`` of 0 none is known."""
    rng, draft, at_s = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS), 0.0
    names = [f"adapter-{number:04d}" for number in range(1, max(1, count) + 1)]
    rng.shuffle(names)
    bounds = list(accumulate((rank + 1) ** -skew for rank in range(len(names))))
    ranks = [each for power in range(13) if LEAST_RANK <= (each := 1 << power) <= rank] or [rank]
    prefixes = [draft.shared_prefix(PREFIX_TOKENS // draft.block_tokens) for _ in names]
    for _ in range(requests):
        number = bisect_left(bounds, rng.random() * bounds[-1])
        prompt = draft.extended(prefixes[number], PREFIX_TOKENS + QUESTION_TOKENS.sample_int(rng))
        answer_tokens, adapter_rank = ANSWER_TOKENS.sample_int(rng), ranks[number % len(ranks)]
        draft.add(at_s, prompt, answer_tokens, adapter=names[number], adapter_rank=adapter_rank)
        at_s += exponential(rng, 1 / RATE_PER_S)
    return draft.finish(f"adapters-{len(names)}", requests)
