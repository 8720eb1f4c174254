"""Synthetic traces that isolate one property each: the popularity of prefixes, its change in time, arrivals in bursts,
lengths of answers, and work in which prefixes hardly matter.

Every prompt is one of some shared prefixes followed by a tail of its own; arrivals are a Poisson process, where nothing
else is said.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from random import Random

from dualmap.simulation.workload.generators.draft import Draft
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 8.0
PREFIXES = 400
PREFIX_BLOCKS = 10
TAIL_TOKENS = QuantileTable(((0, 64), (0.25, 400), (0.5, 1000), (0.75, 2000), (0.95, 5000), (1, 9000)))
OUTPUT_TOKENS = QuantileTable(((0, 1), (0.25, 80), (0.5, 200), (0.75, 400), (0.95, 700), (1, 1500)))

REASONING_PREFIX_BLOCKS = 2
REASONING_TAIL_TOKENS = QuantileTable(((0, 100), (0.5, 800), (1, 2000)))
REASONING_OUTPUT_TOKENS = QuantileTable(((0, 500), (0.5, 4000), (1, 8000)))

HEAVY_OUTPUT_TOKENS = QuantileTable(((0, 1), (0.5, 100), (0.9, 800), (0.99, 8000), (1, 16_000)))

FEWSHOT_PREFIX_BLOCKS = 12
FEWSHOT_TAIL_TOKENS = QuantileTable(((0, 50), (1, 500)))
FEWSHOT_OUTPUT_TOKENS = QuantileTable(((0, 10), (1, 80)))

HOT_SHARE = 0.45
HOT_SPELL_S = 120.0
HOT_BLOCKS = 6

SYSTEM_PROMPT_BLOCKS = 12
MOVING_SHARE = 0.6
MOVING_SPELL_S = 60.0
FOREVER_S = math.inf

ON_S, OFF_S = 10.0, 20.0
ON_SHARE = 0.9
"""Part of the requests that arrive while the source is on."""


def uniform(requests: int, seed: int) -> Trace:
    """Every prefix equally popular: nothing to spread, only reuse to keep."""
    return _prefix_trace("uniform", requests, seed, skew=0.0)


def zipf(requests: int, seed: int, skew: float = 1.1) -> Trace:
    """Prefix number k has a popularity in proportion to k ** -skew."""
    return _prefix_trace(f"zipf-{skew:g}", requests, seed, skew)


def hotspot(requests: int, seed: int) -> Trace:
    """Uniform traffic with one more, hot prefix (45 % of requests), replaced by a new one every two minutes."""
    return _prefix_trace("hotspot", requests, seed, skew=0.0, hot_share=HOT_SHARE)


def moving(requests: int, seed: int) -> Trace:
    """Uniform traffic with a hot system prompt of 6,144 tokens (60 % of requests), replaced by a new one every minute:
    requests that gathered where the former one was cached have to gather again."""
    return _prefix_trace(
        "moving", requests, seed, hot_share=MOVING_SHARE, hot_blocks=SYSTEM_PROMPT_BLOCKS, hot_spell_s=MOVING_SPELL_S
    )


def shared(requests: int, seed: int, share: int = 80) -> Trace:
    """Uniform traffic with one system prompt of 6,144 tokens before ``share`` % of the requests, for good: no instance
    alone can serve all that it is cached for."""
    return _prefix_trace(
        f"shared-{share}",
        requests,
        seed,
        hot_share=share / 100,
        hot_blocks=SYSTEM_PROMPT_BLOCKS,
        hot_spell_s=FOREVER_S,
    )


def bursts(requests: int, seed: int, variation: int = 3) -> Trace:
    """Uniform traffic whose gaps between arrivals have a gamma distribution with this coefficient of variation (1 is a
    Poisson process)."""
    shape = variation**-2
    return _prefix_trace(f"bursts-{variation}", requests, seed, gap_s=lambda rng: rng.gammavariate(shape, 1 / shape))


def onoff(requests: int, seed: int) -> Trace:
    """Uniform traffic, 90 % of which arrives in spells of 10 s with 20 s between them."""
    return _prefix_trace("onoff", requests, seed, moment_s=_on_and_off)


def heavytail(requests: int, seed: int) -> Trace:
    """Uniform traffic whose answers have a heavy tail: half of them below 100 tokens, one in a hundred above 8,000."""
    return _prefix_trace("heavytail", requests, seed, output_tokens=HEAVY_OUTPUT_TOKENS)


def _on_and_off(at_s: float) -> float:
    """The moment of an arrival that a steady source of the same rate has at ``at_s``."""
    period_s = ON_S + OFF_S
    periods, part_s = divmod(at_s, period_s)
    on_s = ON_SHARE * period_s
    if part_s < on_s:
        return periods * period_s + part_s * ON_S / on_s
    return periods * period_s + ON_S + (part_s - on_s) * OFF_S / (period_s - on_s)


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


def uncached(requests: int, seed: int, tokens: int = 16_000, answer: int = 200) -> Trace:
    """Prompts of one length that share nothing, and answers of one length."""
    rng, draft, at_s = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS), 0.0
    for _ in range(requests):
        draft.add(at_s, draft.extended((), tokens), answer)
        at_s += exponential(rng, 1 / RATE_PER_S)
    return draft.finish(f"uncached-{tokens}", requests)


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
    hot_blocks: int = HOT_BLOCKS,
    hot_spell_s: float = HOT_SPELL_S,
    gap_s: Callable[[Random], float] = lambda rng: exponential(rng, 1.0),
    moment_s: Callable[[float], float] = lambda at_s: at_s,
) -> Trace:
    """``gap_s`` gives gaps between arrivals with a mean of 1, which are scaled to the rate; ``moment_s`` moves the
    moments that follow from them."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    shared = [draft.shared_prefix(prefix_blocks) for _ in range(prefixes)]
    weights = list(accumulate((rank + 1) ** -skew for rank in range(prefixes)))
    hot_prefixes: list[tuple[int, ...]] = []
    at_s = 0.0
    for _ in range(requests):
        while len(hot_prefixes) <= at_s // hot_spell_s:
            hot_prefixes.append(draft.shared_prefix(hot_blocks))
        if rng.random() < hot_share:
            prefix = hot_prefixes[-1]
        else:
            prefix = shared[bisect_left(weights, rng.random() * weights[-1])]
        tokens = len(prefix) * draft.block_tokens + tail_tokens.sample_int(rng)
        draft.add(moment_s(at_s), draft.extended(prefix, tokens), output_tokens.sample_int(rng))
        at_s += gap_s(rng) / RATE_PER_S
    return draft.finish(name, requests)
