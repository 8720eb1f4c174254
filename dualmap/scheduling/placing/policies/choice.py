"""Code that every policy shares: filtering, ranking with fair ties, and writing the decision down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.ttft import expected_ttft_s
from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.options import TierCredits
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState

Cost = tuple[float, ...]
"""A cost, compared element by element: later elements only break ties."""


def usable(query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> list[InstanceLoad]:
    """The loads that may be chosen, in their order: ready and not excluded.

    Raises:
        NoInstanceError: none is left.
    """
    excluded = query.excluded
    left = [load for load in loads.values() if load.state is InstanceState.READY and load.instance_id not in excluded]
    if not left:
        raise NoInstanceError(f"none of {', '.join(loads) or 'no candidates'} can take the request")
    return left


def ranked(loads: Sequence[InstanceLoad], costs: Sequence[Cost], turn: int) -> tuple[InstanceLoad, InstanceLoad | None]:
    """The load of least cost and the next best. Equal costs take turns, so ties do not herd on one instance."""
    best = _argmin(costs, turn)
    if len(loads) == 1:
        return loads[0], None
    others = [*loads[:best], *loads[best + 1 :]]
    second = _argmin([*costs[:best], *costs[best + 1 :]], turn)
    return loads[best], others[second]


def _argmin(costs: Sequence[Cost], turn: int) -> int:
    lowest = min(costs)
    tied = [index for index, cost in enumerate(costs) if cost == lowest]
    return tied[turn % len(tied)]


def decide(
    query: RouteQuery,
    chosen: InstanceLoad,
    alternative: InstanceLoad | None,
    reason: Reason,
    decode_stall_s: float,
    *,
    looked_at_load: bool = True,
) -> Decision:
    """The decision for ``chosen``; with nothing to choose from the reason is ONLY_ONE."""
    uncached_tokens = query.chain.uncached_tokens(chosen.hit_blocks)
    return Decision(
        instance_id=chosen.instance_id,
        hit_blocks=chosen.hit_blocks,
        uncached_tokens=uncached_tokens,
        expected_ttft_s=expected_ttft_s(chosen, uncached_tokens, decode_stall_s),
        reason=reason if alternative is not None else Reason.ONLY_ONE,
        alternative_id=alternative.instance_id if alternative is not None else None,
        alternative_uncached_tokens=(
            query.chain.uncached_tokens(alternative.hit_blocks) if alternative is not None else 0
        ),
        seen_pending_tokens=chosen.pending_tokens if looked_at_load else None,
    )


def credited_tokens(chain: Chain, load: InstanceLoad, options: TierCredits) -> float:
    """The hit in tokens, those in tiers counted by constants: the rule of peers that know no price."""
    tiers = load.tiers
    on_device = chain.hit_tokens(load.hit_blocks - tiers.blocks)
    return on_device + chain.block_tokens * sum([options.credit(tier) * blocks for tier, blocks, _ in tiers.by_tier])


def in_flight(load: InstanceLoad) -> int:
    """See ``InstanceLoad.in_flight``."""
    return load.in_flight
