"""The cost of each candidate of a placement, for people: the weighted sum of its features, part by part.

Computed on request, from the kept loads and the policy and weights of now: they may have changed since the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import mul
from typing import Any

from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.requests.explain import Explanation, PlacementRound
from dualmap.scheduling.estimates.weights import Form, Weights, features_of
from dualmap.scheduling.placing.decision import RouteQuery
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad

PARTS: Mapping[str, tuple[str, ...]] = {
    "work ahead": ("ahead_s", "progress_s", "stall_s", "constant"),
    "work it overtakes": ("overtaken_s",),
    "KV memory in use": ("kv_demand",),
    "other running requests": ("running_share",),
    "own prefill, weighed": ("compute_s", "hot_compute_s", "uncached_tokens", "attention_pairs", "prompt_tokens"),
    "own prefill, weighed by KV memory in use": ("crowded_compute_s",),
    "own prefill, weighed by running requests": ("decoding_compute_s",),
    "misses the SLO": ("missed",),
}
"""Parts of a cost in words, with the features that each adds up."""


def costs_of(explanation: Explanation, each: PlacementRound, pool: ServedPool) -> dict[str, dict[str, Any]]:
    """The costs by instance: ``expected_ttft_s``, ``total_s`` and its ``parts`` in seconds, in the words of ``PARTS``.
    A policy that does not weigh has no cost: only an expected TTFT."""
    prompt, slo_s = explanation.prompt, explanation.course.slo_s
    chain = Chain((prompt.key.hash,), prompt.block_tokens, prompt.prompt_tokens)
    weights = pool.policy.weights(RouteQuery(chain, slo_s), pool.view.learned)
    return {
        instance_id: _cost(weights, load, chain, slo_s, prompt.key.hot_tokens, pool)
        for instance_id, load in each.loads.items()
    }


def _cost(
    weights: Weights, load: InstanceLoad, chain: Chain, slo_s: float, hot_tokens: int, pool: ServedPool
) -> dict[str, Any]:
    features = features_of(load, chain, pool.scheduling.decode_stall_s, hot_tokens)
    ttft_s = weights.ttft.of(features)
    costs: dict[str, Any] = {"expected_ttft_s": ttft_s, "uncached_tokens": chain.uncached_tokens(load.hit_blocks)}
    if pool.policy.weighs:
        features_s = dict(zip(Form._fields, map(mul, weights.cost, features), strict=True))
        features_s["missed"] = weights.missed.of(features) if ttft_s > slo_s else 0.0
        sums = {words: sum(features_s[name] for name in names) for words, names in PARTS.items()}
        parts = {words: part for words, part in sums.items() if part}
        costs |= {"parts": parts, "total_s": sum(parts.values())}
    return costs
