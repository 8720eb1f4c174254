"""llm-d's weighted scorers: prefix match, queue length, KV memory in use."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.state.instance import InstanceLoad


class LlmDOptions(PolicyOptions):
    """Parameters of policy ``llm-d``."""

    prefix_weight: float = Field(3.0, ge=0, description="weight of the prefix match")
    queue_weight: float = Field(2.0, ge=0, description="weight of the waiting queue")
    kv_weight: float = Field(2.0, ge=0, description="weight of the KV memory in use")


@dataclass(frozen=True)
class LlmD(FleetPolicy):
    """Source: llm-d router, default profile: scorers 3 / 2 / 2 with the max-score picker.

    ``3 * match / total + 2 * (max queue - queue) / (max - min) + 2 * (1 - KV use)``; equal queues all score 1.
    The queue is what waits, not what runs. Equal scores take turns.
    """

    options: LlmDOptions = field(default_factory=LlmDOptions)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        weights, total = self.options, query.chain.prompt_tokens
        queues = [load.queued_requests for load in loads]
        longest = max(queues)
        spread = longest - min(queues)
        costs: list[Cost] = [
            (
                -(
                    weights.prefix_weight * query.chain.hit_tokens(load.hit_blocks) / total
                    + weights.queue_weight * ((longest - load.queued_requests) / spread if spread else 1.0)
                    + weights.kv_weight * (1 - load.kv_usage)
                ),
            )
            for load in loads
        ]
        return self.cheapest(query, loads, costs, Reason.COST)
