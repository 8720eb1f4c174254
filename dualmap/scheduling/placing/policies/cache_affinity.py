"""Cache affinity: one ring, at any load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import PairPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class CacheAffinity(PairPolicy):
    """Consistent hashing of the hash key onto the first ring (Karger et al., 1997).

    All costs are equal, so the first ring's candidate is taken. The second ring only names the instance for a request
    that failed on its own.
    """

    holds: ClassVar[bool] = False

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return Weights(Form(), PLAIN_TTFT)

    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.CACHE
