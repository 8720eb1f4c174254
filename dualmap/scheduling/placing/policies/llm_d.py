"""llm-d's weighted scorers: prefix match, queue length, KV memory in use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from pydantic import Field

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import Weights
from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, credited_tokens
from dualmap.scheduling.placing.policies.fleet import LOADS_ALL, FleetPolicy
from dualmap.scheduling.placing.policies.options import TierCredits
from dualmap.scheduling.state.instance import InstanceLoad


class LlmDOptions(TierCredits):
    """Parameters of policy ``llm-d``."""

    prefix_weight: float = Field(3.0, ge=0, description="weight of the prefix match")
    queue_weight: float = Field(2.0, ge=0, description="weight of the waiting queue")
    kv_weight: float = Field(2.0, ge=0, description="weight of the KV memory in use")
    host_credit: float = Field(0.8, ge=0, le=1, description="weight of a block in host memory")
    disk_credit: float = Field(0.3, ge=0, le=1, description="weight of a block on disk")
    pool_credit: float = Field(0.4, ge=0, le=1, description="weight of a block in a shared store")
    pull_from_tokens: int | None = Field(
        None, ge=1, description="tokens that another instance has more of the prompt, from which on they are pulled"
    )


PULLS_ALL: Final = LOADS_ALL._replace(ttft=LOADS_ALL.ttft._replace(load_s=0.0))
"""Whatever a source has beyond the chosen instance is pulled, however long that takes."""


@dataclass(frozen=True)
class LlmD(FleetPolicy):
    """Source: llm-d router, default profile: scorers 3 / 2 / 2 with the max-score picker.

    ``3 * match / total + 2 * (max queue - queue) / (max - min) + 2 * (1 - KV use)``; equal queues all score 1.
    The queue is what waits, not what runs. Equal scores take turns. A block in a tier counts by a constant (those of
    its index are the defaults), and all that a tier has is loaded. With ``pull_from_tokens`` the chosen instance pulls
    where another one has so many tokens more (``minCachedTokenDelta`` of its ``p2p-source-producer``): from the one
    with the most, of equal ones that with the shortest queue, where llm-d draws one by 1 / (1 + queue).
    """

    options: LlmDOptions = field(default_factory=LlmDOptions)

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        return LOADS_ALL if self.options.pull_from_tokens is None else PULLS_ALL

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        weights, total = self.options, query.chain.prompt_tokens
        queues = [load.queued_requests for load in loads]
        longest = max(queues)
        spread = longest - min(queues)
        costs: list[Cost] = [
            (
                -(
                    weights.prefix_weight * credited_tokens(query.chain, load, weights) / total
                    + weights.queue_weight * ((longest - load.queued_requests) / spread if spread else 1.0)
                    + weights.kv_weight * (1 - load.kv_usage)
                ),
            )
            for load in loads
        ]
        decision = self.cheapest(query, loads, costs, Reason.COST)
        if weights.pull_from_tokens is None:
            return decision
        source = max(loads, key=lambda load: (load.hit_blocks, -load.queued_requests))
        lacks = query.chain.hit_tokens(source.hit_blocks) - query.chain.hit_tokens(decision.hit_blocks)
        return replace(decision, source=source.instance_id if lacks >= weights.pull_from_tokens else None)
