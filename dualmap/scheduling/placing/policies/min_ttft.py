"""Min TTFT: the least estimated time to first token in the fleet."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class MinTtft(FleetPolicy):
    """Source: Mooncake (FAST 2025), cache-aware scheduling.

    Queueing time (pending prefill tokens) plus compute time (prompt less its longest match there), both through
    the instance's prefill rate. The decode-bottleneck correction is DualMap's and not part of it.
    """

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        uncached_tokens = query.chain.uncached_tokens
        costs: list[Cost] = [
            (
                (load.pending_tokens + uncached_tokens(load.hit_blocks)) / load.prefill_tokens_per_s,
                in_flight(load),
            )
            for load in loads
        ]
        return self.cheapest(query, loads, costs, Reason.COST)
