"""Base of the policies that choose within a candidate pair: their cost does not grow with the fleet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Form, Weights
from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.settings import Order
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView

PAIR = 2

LOAD = Form(ahead_s=1.0, overtaken_s=1.0, kv_demand=1e-3)
"""The less loaded of two: by queued work, and among equals by KV memory in use."""
CACHE_FIRST = 1e3
"""Weight of a token of own prefill where a larger hit decides before any load does. Seconds would distinguish equal
hits by the instances' prefill rates."""
NEVER = 1e11
"""Cost of a candidate that is taken only if the other one is no better: more than ``CACHE_FIRST`` of any prompt."""


@dataclass(frozen=True)
class PairPolicy(ABC):
    """Candidates from the two rings; a subclass says what one costs and why it won. Equal costs: the first ring's."""

    name: str
    decode_stall_s: float
    rebalances: bool = False
    holds: ClassVar[bool] = True
    queue_order: ClassVar[Order] = "fifo"
    weighs: ClassVar[bool] = True
    beyond_from_s: ClassVar[float | None] = None

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view)

    @abstractmethod
    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        """The cost of a candidate."""

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        if query.excluded and chosen not in query.pair:
            return Reason.BEYOND_PAIR
        return self.reason_in_pair(query, loads[chosen], loads[other])

    @abstractmethod
    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        """Why one of the two candidates was taken, and not the other."""

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        raise NotImplementedError("the policy weighs: the store chooses by its weights")


@dataclass(frozen=True)
class BeyondPair:
    """Base of the policies that weigh the pair, and past it the instance that holds the prefix and the least loaded. A
    subclass says what an instance costs, and why one was taken."""

    kv_weight_s: float
    rebalances: ClassVar[bool] = False
    holds: ClassVar[bool] = False
    queue_order: ClassVar[Order] = "deadline"
    weighs: ClassVar[bool] = True
    beyond_from_s: ClassVar[float] = 0.1

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        return pair_of(query, view)

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        raise NotImplementedError("the policy weighs: the store chooses by its weights")


def pair_of(query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
    """The candidate pair of the request's hash key, less those that are excluded; two others if both are.

    Raises:
        NoInstanceError: no ready instance is left for this request.
    """
    key = query.key or view.key_of(query.chain)
    pair = view.rings.pair(key.hash)
    if not query.excluded:
        if not pair:
            raise NoInstanceError("no instance is ready")
        return pair
    left = tuple(instance_id for instance_id in pair if instance_id not in query.excluded)
    return left or _beyond(pair, query.excluded, view.ready)


def _beyond(pair: tuple[str, ...], excluded: frozenset[str], ready: tuple[str, ...]) -> tuple[str, ...]:
    """Two more instances for a request whose whole pair is excluded: the next in id order after it."""
    start = bisect_right(ready, pair[-1]) if pair else 0
    left: list[str] = []
    for offset in range(len(ready)):
        instance_id = ready[(start + offset) % len(ready)]
        if instance_id not in excluded:
            left.append(instance_id)
            if len(left) == PAIR:
                break
    if not left:
        raise NoInstanceError("every ready instance is excluded")
    return tuple(left)
