"""The cost of each candidate of a placement, for people: the weighted sum of its features, part by part.

Computed on request, from the kept loads and the policy and weights of now: they may have changed since the decision.
"""

from __future__ import annotations

from operator import mul
from typing import Any

from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.requests.explain import Explanation, PlacementRound
from dualmap.scheduling.estimates.weights import PARTS, Form, Weights, features_of
from dualmap.scheduling.placing.decision import RouteQuery
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad

MISSED = "misses the SLO"
"""The part of a cost that a missed SLO adds."""


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
        sums = dict.fromkeys([*PARTS.values(), MISSED], 0.0)
        for name, cost_s in zip(Form._fields, map(mul, weights.cost, features), strict=True):
            sums[PARTS[name]] += cost_s
        sums[MISSED] = weights.missed.of(features) if ttft_s > slo_s else 0.0
        parts = {words: part for words, part in sums.items() if part}
        costs |= {"parts": parts, "total_s": sum(parts.values())}
    return costs
