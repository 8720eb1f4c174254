"""Round robin: every instance in turn."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import decide
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class RoundRobin(FleetPolicy):
    """Counts with the query's sequence, which is one for all replicas: the rotation is the fleet's."""

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        turn = query.sequence % len(loads)
        chosen, following = loads[turn], loads[(turn + 1) % len(loads)]
        alternative = following if following is not chosen else None
        return decide(query, chosen, alternative, Reason.ROTATION, self.decode_stall_s, looked_at_load=False)
