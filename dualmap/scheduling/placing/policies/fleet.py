"""Base of the policies that look at every ready instance; their cost grows with the fleet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, decide, ranked, usable
from dualmap.scheduling.settings import Order
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView

LOADS_ALL: Final = Weights(Form(compute_s=1.0), PLAIN_TTFT)
"""Whatever the tiers of the chosen instance have is loaded: these policies know no price."""


@dataclass(frozen=True)
class FleetPolicy(ABC):
    """All ready instances are candidates; a subclass picks among them. Held requests stay where they are."""

    name: str
    decode_stall_s: float
    rebalances: bool = False
    holds: ClassVar[bool] = False
    queue_order: ClassVar[Order] = "fifo"
    weighs: ClassVar[bool] = False
    beyond_from_s: ClassVar[float | None] = None

    def candidates(self, query: RouteQuery, view: ClusterView) -> tuple[str, ...]:
        if not query.excluded:
            left = view.ready
        else:
            left = tuple(instance_id for instance_id in view.ready if instance_id not in query.excluded)
        if not left:
            raise NoInstanceError("no instance is ready" if not view.ready else "every ready instance is excluded")
        return left

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return LOADS_ALL

    def reason(
        self, query: RouteQuery, hits: Mapping[str, int], loads: Mapping[str, InstanceLoad], chosen: str, other: str
    ) -> Reason:
        raise NotImplementedError("the policy chooses: its decision says why")

    def choose(self, query: RouteQuery, loads: Mapping[str, InstanceLoad]) -> Decision:
        return self.pick(query, usable(query, loads))

    @abstractmethod
    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        """Decide among the loads, at least one, all of them ready."""

    def cheapest(self, query: RouteQuery, loads: list[InstanceLoad], costs: list[Cost], reason: Reason) -> Decision:
        """The load of least cost, the next best as its alternative."""
        chosen, alternative = ranked(loads, costs, query.sequence)
        return decide(query, chosen, alternative, reason, self.decode_stall_s)
