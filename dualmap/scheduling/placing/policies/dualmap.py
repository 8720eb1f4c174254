"""DualMap: the larger hit while it meets the SLO, the less loaded candidate past that."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights, features_of
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import CACHE_FIRST, LOAD, NEVER, PairPolicy
from dualmap.scheduling.state.instance import InstanceLoad

UNCORRECTED_TTFT = PLAIN_TTFT._replace(stall_s=0.0)


@dataclass(frozen=True)
class DualMap(PairPolicy):
    """SLO-aware choice within the pair.

    Source: DualMap (ICLR 2026). The candidate with the larger hit as long as its expected TTFT is within the SLO; only
    past that the less loaded one; equal hits: always the less loaded one. The smaller TTFT is not chased per request:
    that flips between the candidates and destroys reuse. Both past the SLO: the less loaded one, and the rebalancer
    looks at it.

    Routing takes the plain estimate; the correction for decode stalls is rebalancing's alone (the paper's appendix).

    As weights: own prefill outweighs any load. Where the SLO is missed that weight is removed, and the candidate ranks
    behind every one that meets the SLO.
    """

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        missed = Form(constant=NEVER, uncached_tokens=-CACHE_FIRST)
        return Weights(LOAD._replace(uncached_tokens=CACHE_FIRST), UNCORRECTED_TTFT, missed)

    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        if UNCORRECTED_TTFT.of(features_of(chosen, query.chain, self.decode_stall_s)) > query.slo_s:
            return Reason.BOTH_OVERLOADED
        if chosen.hit_blocks == other.hit_blocks:
            return Reason.BALANCE
        return Reason.CACHE if chosen.hit_blocks > other.hit_blocks else Reason.SLO
