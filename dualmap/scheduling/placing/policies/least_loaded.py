"""Least loaded: the fewest pending tokens in the fleet."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class LeastLoaded(FleetPolicy):
    """Join the shortest queue, measured in pending tokens; requests in flight break ties."""

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        costs: list[Cost] = [(load.pending_tokens, in_flight(load)) for load in loads]
        return self.cheapest(query, loads, costs, Reason.BALANCE)
