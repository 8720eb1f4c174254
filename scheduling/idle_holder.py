"""The placement that leaves nothing to weigh: an idle candidate that holds as much of the prompt as anybody known.

A store that sees one reserves it in the step in which it observes, so that an unloaded fleet pays one round trip for a
placement. It is what the policy would say of the same loads, never something else; tests hold the two together. The
store keeps a Lua twin.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduling.chain import Chain
from scheduling.decision import Decision, Reason
from scheduling.instance import InstanceLoad, InstanceState
from scheduling.placement_cost import PlacementCost
from scheduling.settings import SchedulingSettings
from scheduling.ttft import ttft_features
from scheduling.ttft_model import modelled_ttft_s


def idle_holder_cost(settings: SchedulingSettings) -> PlacementCost | None:
    """By what the configured policy tells an idle holder; None: it weighs every placement."""
    return PlacementCost.of(settings) if settings.policy == "dualmap-wide" else None


def idle_holder(
    cost: PlacementCost, chain: Chain, slo_s: float, loads: Mapping[str, InstanceLoad], holder_blocks: int
) -> Decision | None:
    """The decision for a candidate of a pair that is idle, holds the most, is cheapest even if nobody had anything else
    to do, and is expected to meet the SLO; None if there is no such one.

    Args:
        loads: of the candidates, one or two, in their order.
        holder_blocks: length of the prefix that somebody beyond the candidates is known to hold, in blocks.
    """
    ready = [load for load in loads.values() if load.state is InstanceState.READY]
    if not ready:
        return None
    uncached_tokens = [chain.uncached_tokens(load.hit_blocks) for load in ready]
    costs_s = [cost.least_s(load, chain, load.hit_blocks) for load in ready]
    place = costs_s.index(min(costs_s))
    chosen, own_tokens = ready[place], uncached_tokens[place]
    if chosen.pending_tokens != 0 or chosen.hit_blocks < max(holder_blocks, *[load.hit_blocks for load in ready]):
        return None
    features = ttft_features(chosen, 0.0, own_tokens, chain.prompt_tokens - own_tokens)
    expected_ttft_s = modelled_ttft_s(chosen.ttft_weights, features)
    if expected_ttft_s > slo_s:
        return None
    other = ready[1 - place] if len(ready) > 1 else None
    return Decision(
        instance_id=chosen.instance_id,
        hit_blocks=chosen.hit_blocks,
        uncached_tokens=own_tokens,
        expected_ttft_s=expected_ttft_s,
        reason=idle_holder_reason(chosen.hit_blocks, alone=other is None),
        alternative_id=other.instance_id if other is not None else None,
        alternative_uncached_tokens=uncached_tokens[1 - place] if other is not None else 0,
        seen_pending_tokens=0,
        ttft_features=features,
    )


def idle_holder_reason(hit_blocks: int, *, alone: bool) -> Reason:
    """Why an idle holder is taken."""
    if alone:
        return Reason.ONLY_ONE
    return Reason.CACHE if hit_blocks > 0 else Reason.COST
