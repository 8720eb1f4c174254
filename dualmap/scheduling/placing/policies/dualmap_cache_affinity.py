"""Ablation of DualMap: within the pair always the larger hit."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import CACHE_FIRST, LOAD, PairPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class DualMapCacheAffinity(PairPolicy):
    """Source: DualMap (ICLR 2026), ablation: load decides only between equal hits."""

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return Weights(LOAD._replace(uncached_tokens=CACHE_FIRST), PLAIN_TTFT)

    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.CACHE if chosen.hit_blocks > other.hit_blocks else Reason.BALANCE
