"""DualMap: the larger hit while it meets the SLO, the less loaded candidate past that."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduling.decision import Decision, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.pair import PairPolicy
from scheduling.settings import DualMapSettings


@dataclass(frozen=True)
class DualMap(PairPolicy):
    """SLO-aware choice within the pair.

    Source: DualMap (ICLR 2026). The candidate with the larger hit as long as its expected TTFT is within the
    SLO; only past that the less loaded one; equal hits: always the less loaded one. The smaller TTFT is not
    chased per request: that flips between the candidates and destroys reuse. Both past the SLO: the decision
    says ``overloaded`` and the rebalancer looks at the instance. Giving up the hit saves no SLO then, and the
    recompute delays everybody behind; ``when_both_late="larger-hit"`` stays with the hit, which is not the paper's
    rule.
    """

    settings: DualMapSettings = field(default_factory=DualMapSettings)

    def _pick(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> Decision:
        lighter, heavier = self._less_loaded(first, second)
        both_late = self._both_late(query, first, second)
        if first.hit_blocks == second.hit_blocks:
            return self._decide(query, lighter, heavier, Reason.BOTH_OVERLOADED if both_late else Reason.BALANCE)
        cached, plain = (first, second) if first.hit_blocks > second.hit_blocks else (second, first)
        if both_late:
            if self.settings.when_both_late == "larger-hit":
                lighter, heavier = cached, plain
            return self._decide(query, lighter, heavier, Reason.BOTH_OVERLOADED)
        if self._ttft_s(query, cached) <= query.slo_s:
            return self._decide(query, cached, plain, Reason.CACHE)
        return self._decide(query, lighter, heavier, Reason.SLO)
