"""Synthetic traces that isolate one property each: the popularity of prefixes, its change in time, and work in which
prefixes hardly matter.

Every prompt is one of some shared prefixes followed by a tail of its own; arrivals are a Poisson process.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from random import Random

from dualmap.simulation.generators.draft import Draft
from dualmap.simulation.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 8.0
PREFIXES = 400
PREFIX_BLOCKS = 10
TAIL_TOKENS = QuantileTable(((0, 64), (0.25, 400), (0.5, 1000), (0.75, 2000), (0.95, 5000), (1, 9000)))
OUTPUT_TOKENS = QuantileTable(((0, 1), (0.25, 80), (0.5, 200), (0.75, 400), (0.95, 700), (1, 1500)))

REASONING_PREFIX_BLOCKS = 2
REASONING_TAIL_TOKENS = QuantileTable(((0, 100), (0.5, 800), (1, 2000)))
REASONING_OUTPUT_TOKENS = QuantileTable(((0, 500), (0.5, 4000), (1, 8000)))

FEWSHOT_PREFIX_BLOCKS = 12
FEWSHOT_TAIL_TOKENS = QuantileTable(((0, 50), (1, 500)))
FEWSHOT_OUTPUT_TOKENS = QuantileTable(((0, 10), (1, 80)))

HOT_SHARE = 0.45
HOT_SPELL_S = 120.0
HOT_BLOCKS = 6


def uniform(requests: int, seed: int) -> Trace:
    """Every prefix equally popular: nothing to spread, only reuse to keep."""
    return _prefix_trace("uniform", requests, seed, skew=0.0)


def zipf(requests: int, seed: int, skew: float = 1.1) -> Trace:
    """Prefix number k has a popularity in proportion to k ** -skew."""
    return _prefix_trace(f"zipf-{skew:g}", requests, seed, skew)


def hotspot(requests: int, seed: int) -> Trace:
    """Uniform traffic with one more, hot prefix (45 % of requests), replaced by a new one every two minutes."""
    return _prefix_trace("hotspot", requests, seed, skew=0.0, hot_share=HOT_SHARE)


def reasoning(requests: int, seed: int) -> Trace:
    """Short questions behind one system prompt, answers of thousands of tokens: decoding is all there is to spread."""
    return _prefix_trace(
        "reasoning",
        requests,
        seed,
        prefixes=1,
        prefix_blocks=REASONING_PREFIX_BLOCKS,
        tail_tokens=REASONING_TAIL_TOKENS,
        output_tokens=REASONING_OUTPUT_TOKENS,
    )


def fewshot(requests: int, seed: int) -> Trace:
    """One long prompt of examples before every question, answers of a few words: cached everywhere, many a second."""
    return _prefix_trace(
        "fewshot",
        requests,
        seed,
        prefixes=1,
        prefix_blocks=FEWSHOT_PREFIX_BLOCKS,
        tail_tokens=FEWSHOT_TAIL_TOKENS,
        output_tokens=FEWSHOT_OUTPUT_TOKENS,
    )


def _prefix_trace(
    name: str,
    requests: int,
    seed: int,
    skew: float = 0.0,
    hot_share: float = 0.0,
    *,
    prefixes: int = PREFIXES,
    prefix_blocks: int = PREFIX_BLOCKS,
    tail_tokens: QuantileTable = TAIL_TOKENS,
    output_tokens: QuantileTable = OUTPUT_TOKENS,
) -> Trace:
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    shared = [draft.shared_prefix(prefix_blocks) for _ in range(prefixes)]
    weights = list(accumulate((rank + 1) ** -skew for rank in range(prefixes)))
    hot_prefixes: list[tuple[int, ...]] = []
    at_s = 0.0
    for _ in range(requests):
        while len(hot_prefixes) <= at_s // HOT_SPELL_S:
            hot_prefixes.append(draft.shared_prefix(HOT_BLOCKS))
        if rng.random() < hot_share:
            prefix = hot_prefixes[-1]
        else:
            prefix = shared[bisect_left(weights, rng.random() * weights[-1])]
        tokens = len(prefix) * draft.block_tokens + tail_tokens.sample_int(rng)
        draft.add(at_s, draft.extended(prefix, tokens), output_tokens.sample_int(rng))
        at_s += exponential(rng, 1 / RATE_PER_S)
    return draft.finish(name, requests)
