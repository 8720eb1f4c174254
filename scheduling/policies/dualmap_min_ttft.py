"""Ablation of DualMap: within the pair always the smaller expected TTFT."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.decision import Decision, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.pair import PairPolicy


@dataclass(frozen=True)
class DualMapMinTtft(PairPolicy):
    """Source: DualMap (ICLR 2026), ablation: greedy per request, whatever it does to later reuse."""

    def _pick(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> Decision:
        lighter, heavier = self._less_loaded(first, second)
        if self._ttft_s(query, heavier) < self._ttft_s(query, lighter):
            lighter, heavier = heavier, lighter
        return self._decide(query, lighter, heavier, Reason.COST)
