"""Cache affinity: one ring, whatever the load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scheduling.decision import Decision, Reason, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.policies.pair import PairPolicy


@dataclass(frozen=True)
class CacheAffinity(PairPolicy):
    """Consistent hashing of the hash key onto the first ring (Karger et al., 1997).

    The second ring only names where a request goes that failed on its own instance.
    """

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        return replace(super().choose(query, loads), seen_pending_tokens=None)

    def _pick(self, query: RouteQuery, first: InstanceLoad, second: InstanceLoad) -> Decision:
        return self._decide(query, first, second, Reason.CACHE)
