"""llm-d's predicted-latency profile: sticky to long matches, then the headroom to the SLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from dualmap.scheduling.estimates.ttft import expected_ttft_s
from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.state.instance import InstanceLoad

STRICT_SHARE, LOOSE_SHARE = 0.99, 0.8
"""Shares of a prompt that an instance holds, from which on a request sticks to it: whatever its SLO, and within it."""
MAX_PENALTY_S = 5.0


class LlmDLatencyOptions(PolicyOptions):
    """Parameters of policy ``llm-d-latency``."""

    headroom: Literal["most", "least"] = Field(
        "most", description="which of the instances expected to be on time is taken, by its time to the SLO"
    )


@dataclass(frozen=True)
class LlmDLatency(FleetPolicy):
    """Source: llm-d router, profile of its predicted latency with SLOs: ``prefix-cache-affinity-filter`` at
    ``STRICT_SHARE``, ``slo-headroom-tier-filter``, ``prefix-cache-affinity-filter`` at ``LOOSE_SHARE``,
    ``latency-scorer``.

    Instances that hold nearly all of the prompt, if any; of these, those whose expected TTFT meets the SLO, if any; of
    these, those that hold most of it, if any. An affinity filter keeps all where the best that it would keep is
    expected to answer ``MAX_PENALTY_S`` later than the best of the others. Where the SLO is met the most headroom wins,
    or the least where ``headroom`` says so. If none meets it, an idle one, else the least late.

    Differences: the TTFT is this project's estimate, not a trained model's, and the time per output token, a fifth of
    its score, is left out. So is the share of 1 % that explores instances expected to be late. The best score is taken,
    where llm-d draws an instance at random, weighted by scores.
    """

    options: LlmDLatencyOptions = field(default_factory=LlmDLatencyOptions)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        ttft_s = {
            load.instance_id: expected_ttft_s(load, query.chain.uncached_tokens(load.hit_blocks), self.decode_stall_s)
            for load in loads
        }
        kept = _sticky(query, loads, ttft_s, STRICT_SHARE)
        on_time = [load for load in kept if ttft_s[load.instance_id] <= query.slo_s]
        kept = _sticky(query, on_time or kept, ttft_s, LOOSE_SHARE)
        if on_time:
            sign = 1 if self.options.headroom == "most" else -1
            costs: list[Cost] = [(sign * ttft_s[load.instance_id], in_flight(load)) for load in kept]
            return self.cheapest(query, kept, costs, Reason.SLO)
        idle = [load for load in kept if in_flight(load) == 0] or kept
        return self.cheapest(query, idle, [(ttft_s[load.instance_id],) for load in idle], Reason.BOTH_OVERLOADED)


def _sticky(
    query: RouteQuery, loads: list[InstanceLoad], ttft_s: Mapping[str, float], share: float
) -> list[InstanceLoad]:
    """The loads of the instances that hold this share of the prompt's full blocks, all if none does or waiting for it
    costs too much. The block that an engine computes in any case counts too: the prompt was there before."""
    needed_blocks = share * len(query.chain.hashes)
    sticky = [load for load in loads if load.hit_blocks >= needed_blocks]
    if not sticky:
        return loads
    best_s = min(ttft_s[load.instance_id] for load in sticky)
    return loads if best_s > min(ttft_s[load.instance_id] for load in loads) + MAX_PENALTY_S else sticky
