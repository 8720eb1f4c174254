"""Questions about long documents: a working set of a multiple of the fleet's memory.

Every prompt is one of some documents, whole, and a question; answers are short. What a placement can save is the
prefill of documents, and what decides is where they are kept: on the device, in a tier behind it, or nowhere.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from random import Random

from dualmap.simulation.workload.generators.draft import Draft
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 8.0
DOCUMENTS, DOCUMENT_TOKENS = 300, 12_288
"""2.5 times what eight instances with 184,000 tokens each keep."""
QUESTION_TOKENS = QuantileTable(((0, 20), (0.5, 150), (1, 500)))
ANSWER_TOKENS = QuantileTable(((0, 10), (0.5, 80), (1, 300)))


def documents(
    requests: int, seed: int, documents: int = DOCUMENTS, tokens: int = DOCUMENT_TOKENS, skew: float = 1.0
) -> Trace:
    """Document number k has a popularity in proportion to k ** -skew; with a skew of 0 all are equally popular."""
    weights = [(rank + 1) ** -skew for rank in range(max(1, documents))]
    return _questions(f"documents-{documents}x{tokens}", requests, seed, tokens, weights)


def hotset(
    requests: int, seed: int, documents: int = DOCUMENTS, tokens: int = DOCUMENT_TOKENS, hot: int = 30, share: int = 80
) -> Trace:
    """``hot`` of the documents get ``share`` % of the questions, and all others the rest: equally popular each."""
    hot = min(max(1, hot), max(1, documents))
    cold = max(0, documents - hot)
    weights = [share / hot] * hot + [(100 - share) / max(1, cold)] * cold
    return _questions(f"hotset-{hot}of{documents}x{tokens}", requests, seed, tokens, weights)


def _questions(name: str, requests: int, seed: int, tokens: int, weights: list[float]) -> Trace:
    rng, draft, at_s = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS), 0.0
    blocks = max(1, tokens // draft.block_tokens)
    kept = [draft.shared_prefix(blocks) for _ in weights]
    bounds = list(accumulate(weights))
    for _ in range(requests):
        document = kept[bisect_left(bounds, rng.random() * bounds[-1])]
        prompt = draft.extended(document, blocks * draft.block_tokens + QUESTION_TOKENS.sample_int(rng))
        draft.add(at_s, prompt, ANSWER_TOKENS.sample_int(rng))
        at_s += exponential(rng, 1 / RATE_PER_S)
    return draft.finish(name, requests)
