"""Ablation of DualMap: within the pair always the smaller expected TTFT."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import PairPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class DualMapMinTtft(PairPolicy):
    """Source: DualMap (ICLR 2026), ablation: greedy per request, without regard to later reuse."""

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return Weights(PLAIN_TTFT._replace(kv_demand=1e-3), PLAIN_TTFT)

    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.COST
