"""Ablation of DualMap: within the pair always the less loaded candidate."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import LOAD, PairPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class DualMapLeastLoaded(PairPolicy):
    """Source: DualMap (ICLR 2026), ablation: hits do not count."""

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return Weights(LOAD, PLAIN_TTFT)

    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.BALANCE
