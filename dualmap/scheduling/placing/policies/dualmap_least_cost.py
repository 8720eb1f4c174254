"""The default: DualMap's pair, and past it the instance that holds the prefix and the least loaded; the least cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

from pydantic import Field

from dualmap.scheduling.estimates.adapter_prices import Prices
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.placing.policies.pair import BeyondPair
from dualmap.scheduling.state.instance import InstanceLoad

_BEYOND_PAIR: Final = Reason.BEYOND_PAIR
_CACHE: Final = Reason.CACHE
_COST: Final = Reason.COST


class LeastCostOptions(PolicyOptions):
    """Weights of policy ``dualmap-least-cost``. Experiments change them; the defaults are its measured ones."""

    recompute_weight: float = Field(
        3.0, ge=1, description="weight of own prefill beside work ahead of it; that of a hot prefix weighs 1"
    )
    crowding_weight: float = Field(
        1.0, ge=0, description="multiple of recompute_weight that is added per KV memory's worth of running context"
    )
    adapter_weight: float = Field(3.0, ge=0, description="weight of the load of an adapter: all requests wait for it")
    miss_penalty: float = Field(0.5, ge=0, description="cost of an expected miss, in TTFT SLOs")
    deferred_weight: float = Field(0.05, ge=0, le=1, description="weight of deferred work")


@lru_cache(maxsize=256)
def _miss_cost(cost: float) -> Form:
    """The price of a miss. Most requests have the same SLO, and so the same form."""
    return Form(cost)


@lru_cache(maxsize=256)
def _adapter_cost(cost: Form, weight: float, prices: Prices, answer_s: float) -> Form:
    """The cost of a request for an adapter, which may have to be loaded, or wait for a slot as long as answers take."""
    host, disk = prices
    return cost._replace(adapter_host_s=weight * host, adapter_disk_s=weight * disk, slot_turns=answer_s)


@dataclass(frozen=True)
class DualMapLeastCost(BeyondPair):
    """The least ``work ahead + recompute_weight * own prefill + KV memory in use``, over a few instances.

    Builds on DualMap (ICLR 2026): the rings still decide where a prefix belongs. Four things differ, each for a
    measured reason (``docs/concepts/default-policy.md``). A recomputed token delays all requests queued behind it, so
    own prefill weighs several times its own seconds; loads from tiers do as well, as others queue on their link. A
    hot prefix's prefill does not: more instances are to have that prefix, and the next requests find it there. Own
    prefill weighs more where running requests fill the KV memory, since it then evicts blocks that others would hit.
    Deferred work weighs little, since new requests overtake it. KV memory in use weighs as well: where prompts are
    short and answers long, decoding is the bottleneck. And the instance that was last given the prefix and the least
    loaded ones are weighed too, where they could cost less.
    """

    name: str
    options: LeastCostOptions = field(default_factory=LeastCostOptions)

    @cached_property
    def _cost(self) -> Form:
        options = self.options
        return Form(
            ahead_s=1.0,
            progress_s=-1.0,
            overtaken_s=options.deferred_weight,
            kv_demand=self.kv_weight_s,
            compute_s=options.recompute_weight,
            hot_compute_s=1.0 - options.recompute_weight,
            crowded_compute_s=options.recompute_weight * options.crowding_weight,
            load_s=1.0,
            link_s=options.recompute_weight - 1.0,
        )

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        cost = self._cost
        if query.chain.root is not None:
            cost = _adapter_cost(cost, self.options.adapter_weight, learned.adapter_prices, learned.answer_s)
        return Weights(cost, learned.ttft, _miss_cost(self.options.miss_penalty * query.slo_s))

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        if chosen not in query.pair:
            return _BEYOND_PAIR
        return _CACHE if hits[chosen] > hits[other] else _COST
