"""llm-d's predicted-latency profile: sticky to long matches, then the headroom to the SLO."""

from __future__ import annotations

from dataclasses import dataclass, field

from dualmap.scheduling.estimates.ttft import expected_ttft_s
from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.settings import LlmDSettings
from dualmap.scheduling.state.instance import InstanceLoad

STICKY_SHARE = 0.8
MAX_PENALTY_S = 5.0
EXPLORED = 100
"""One request in so many is not held to its prefix."""


@dataclass(frozen=True)
class LlmDLatency(FleetPolicy):
    """Source: llm-d inference scheduler, plugins ``prefix-cache-affinity-filter``, ``slo-headroom-tier-filter`` and
    ``latency-scorer``, with their default parameters.

    Instances that hold ``STICKY_SHARE`` of the prompt or more, unless the best of them is expected to answer
    ``MAX_PENALTY_S`` later than the best of all. Of these, those whose expected TTFT meets the SLO: the one with the
    most headroom, or the least where ``headroom`` says so. If none meets it, an idle one, else the least late.

    Two differences: the TTFT is this project's estimate, not a trained model's, and the time per output token, a fifth
    of its score, is left out. So is the share of 1 % that explores instances expected to be late.
    """

    settings: LlmDSettings = field(default_factory=LlmDSettings)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        ttft_s = {
            load.instance_id: expected_ttft_s(load, query.chain.uncached_tokens(load.hit_blocks), self.decode_stall_s)
            for load in loads
        }
        kept = self._sticky(query, loads, ttft_s)
        on_time = [load for load in kept if ttft_s[load.instance_id] <= query.slo_s]
        if on_time:
            sign = 1 if self.settings.headroom == "most" else -1
            costs: list[Cost] = [(sign * ttft_s[load.instance_id], in_flight(load)) for load in on_time]
            return self.cheapest(query, on_time, costs, Reason.SLO)
        idle = [load for load in kept if in_flight(load) == 0] or kept
        return self.cheapest(query, idle, [(ttft_s[load.instance_id],) for load in idle], Reason.BOTH_OVERLOADED)

    def _sticky(self, query: RouteQuery, loads: list[InstanceLoad], ttft_s: dict[str, float]) -> list[InstanceLoad]:
        needed = STICKY_SHARE * query.chain.prompt_tokens
        sticky = [load for load in loads if query.chain.hit_tokens(load.hit_blocks) >= needed]
        if not sticky or query.sequence % EXPLORED == EXPLORED - 1:
            return loads
        best_s = min(ttft_s[load.instance_id] for load in sticky)
        return loads if best_s > min(ttft_s.values()) + MAX_PENALTY_S else sticky
