"""The default: DualMap's pair, and past it the instance that holds the prefix and the least loaded; the least cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Final

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import BeyondPair
from dualmap.scheduling.settings import LeastCostSettings
from dualmap.scheduling.state.instance import InstanceLoad

_BEYOND_PAIR: Final = Reason.BEYOND_PAIR
_CACHE: Final = Reason.CACHE
_COST: Final = Reason.COST


@lru_cache(maxsize=256)
def _miss_cost(cost: float) -> Form:
    """The price of a miss. Most requests have the same SLO, and so the same form."""
    return Form(cost)


@dataclass(frozen=True)
class DualMapLeastCost(BeyondPair):
    """The least ``work ahead + recompute_weight * own prefill + KV memory in use``, over a few instances.

    Builds on DualMap (ICLR 2026): the rings still decide where a prefix belongs. Four things differ, each for a
    measured reason (``docs/concepts/default-policy.md``). A recomputed token delays all requests queued behind it, so
    own prefill weighs several times its own seconds; not so that of a hot prefix, which more instances are to have, and
    which the next requests find there. It weighs more where running requests fill the KV memory, since it then evicts
    blocks that others would hit. Deferred work weighs little, since new requests overtake it. KV memory in
    use weighs as well: where prompts are short and answers long, decoding is the bottleneck. And the instance that was
    last given the prefix and the least loaded ones are weighed too, where they could cost less.
    """

    name: str
    settings: LeastCostSettings = field(default_factory=LeastCostSettings)

    @cached_property
    def _cost(self) -> Form:
        settings = self.settings
        return Form(
            ahead_s=1.0,
            progress_s=-1.0,
            overtaken_s=settings.deferred_weight,
            kv_demand=self.kv_weight_s,
            compute_s=settings.recompute_weight,
            hot_compute_s=1.0 - settings.recompute_weight,
            crowded_compute_s=settings.recompute_weight * settings.crowding_weight,
        )

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return Weights(self._cost, learned.ttft, _miss_cost(self.settings.miss_penalty * query.slo_s))

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        if chosen not in query.pair:
            return _BEYOND_PAIR
        return _CACHE if hits[chosen] > hits[other] else _COST
