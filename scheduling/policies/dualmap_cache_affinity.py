"""Ablation of DualMap: within the pair always the larger hit."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.decision import Decision, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.pair import PairPolicy


@dataclass(frozen=True)
class DualMapCacheAffinity(PairPolicy):
    """Source: DualMap (ICLR 2026), ablation. Blind to load, except between equal hits."""

    def _pick(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> Decision:
        if first.hit_blocks == second.hit_blocks:
            return self._decide(query, *self._less_loaded(first, second), Reason.BALANCE)
        if second.hit_blocks > first.hit_blocks:
            first, second = second, first
        return self._decide(query, first, second, Reason.CACHE)
