"""Cache affinity: one ring, at any load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dualmap.scheduling.decision import Reason, RouteQuery
from dualmap.scheduling.instance import InstanceLoad
from dualmap.scheduling.policies.pair import PairPolicy
from dualmap.scheduling.weights import PLAIN_TTFT, Form, Weights


@dataclass(frozen=True)
class CacheAffinity(PairPolicy):
    """Consistent hashing of the hash key onto the first ring (Karger et al., 1997).

    All costs are equal, so the first ring's candidate is taken. The second ring only names the instance for a request
    that failed on its own.
    """

    holds: ClassVar[bool] = False

    def _weights(self) -> Weights:
        return Weights(Form(), PLAIN_TTFT)

    def _reason(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.CACHE
