"""A request that belongs to one instance: it continues a response that only this instance has stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Weights
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.settings import Order
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView


@dataclass(frozen=True, slots=True)
class Pinned:
    """The instance while it is ready and has not failed the request, else what the pool's policy would take."""

    policy: Policy
    instance_id: str
    weighs: ClassVar[bool] = True
    rebalances: ClassVar[bool] = False
    holds: ClassVar[bool] = True
    beyond_from_s: ClassVar[float | None] = None

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def queue_order(self) -> Order:
        return self.policy.queue_order

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        if self.instance_id in view.ready and self.instance_id not in query.excluded:
            return (self.instance_id,)
        return self.policy.candidates(query, view)

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return self.policy.weights(query, learned)

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        return Reason.ONLY_ONE if chosen == self.instance_id else self.policy.reason(query, hits, loads, chosen, other)

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        raise NotImplementedError("a pinned request is weighed")
