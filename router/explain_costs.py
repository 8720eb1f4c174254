"""What each candidate of a placement cost, for people: the weighted sum of its features, part by part.

Computed when asked, from the kept loads and the policy and weights of now: they may have changed since the decision.
"""

from __future__ import annotations

from operator import mul
from typing import Any

from router.explain import Explanation, PlacementRound
from router.served_pool import ServedPool
from scheduling.chain import Chain
from scheduling.decision import RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.weights import Form, Weights, features_of


def costs_of(explanation: Explanation, each: PlacementRound, pool: ServedPool) -> dict[str, dict[str, Any]]:
    """By instance: ``expected_ttft_s``, ``total_s`` and its ``parts`` in seconds by feature, ``missed`` among them.

    A policy that does not weigh has no cost: only what TTFT it expects.
    """
    chain = Chain((explanation.hash_key,), explanation.block_tokens, explanation.prompt_tokens)
    weights = pool.policy.weights(RouteQuery(chain, explanation.slo_s), pool.view.learned)
    return {
        instance_id: _cost(weights, load, chain, explanation.slo_s, pool) for instance_id, load in each.loads.items()
    }


def _cost(weights: Weights, load: InstanceLoad, chain: Chain, slo_s: float, pool: ServedPool) -> dict[str, Any]:
    features = features_of(load, chain, pool.scheduling.decode_stall_s)
    ttft_s = weights.ttft.of(features)
    told: dict[str, Any] = {"expected_ttft_s": ttft_s, "uncached_tokens": chain.uncached_tokens(load.hit_blocks)}
    if pool.policy.weighs:
        parts = _parts(weights.cost, features)
        if ttft_s > slo_s and (missed := weights.missed.of(features)):
            parts["missed"] = missed
        told |= {"parts": parts, "total_s": sum(parts.values())}
    return told


def _parts(form: Form, features: Form) -> dict[str, float]:
    return {name: part for name, part in zip(Form._fields, map(mul, form, features), strict=True) if part}
