"""Ablation of DualMap: within the pair always the smaller load."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.decision import Decision, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.pair import PairPolicy


@dataclass(frozen=True)
class DualMapLeastLoaded(PairPolicy):
    """Source: DualMap (ICLR 2026), ablation: the power of two choices alone. Hits only decide between equal loads."""

    def _pick(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> Decision:
        if self._load(first) == self._load(second) and second.hit_blocks > first.hit_blocks:
            return self._decide(query, second, first, Reason.CACHE)
        return self._decide(query, *self._less_loaded(first, second), Reason.BALANCE)
