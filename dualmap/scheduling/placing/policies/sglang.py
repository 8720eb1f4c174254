"""SGLang's cache-aware policy: shortest queue when unbalanced, best match or smallest tree otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.state.instance import InstanceLoad


class SglangOptions(PolicyOptions):
    """Parameters of policy ``sglang``."""

    cache_threshold: float = Field(0.3, ge=0, le=1, description="matched share of the prompt above which reuse wins")
    balance_abs_threshold: int = Field(64, ge=0, description="difference of requests in flight that is unbalanced")
    balance_rel_threshold: float = Field(1.5, ge=1, description="ratio of requests in flight that is unbalanced")


@dataclass(frozen=True)
class Sglang(FleetPolicy):
    """Source: SGLang router and its successor smg, policy ``cache_aware``. Load is requests in flight.

    Unbalanced (max - min > ``balance_abs_threshold`` and max > ``balance_rel_threshold`` * min): shortest queue.
    Balanced: the best match if its rate exceeds ``cache_threshold``, else the smallest of the trees, one for each
    instance, of the prompts that were sent there. The blocks that the KV metadata lists stand for the size of a tree.
    """

    options: SglangOptions = field(default_factory=SglangOptions)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        queues = [in_flight(load) for load in loads]
        longest, shortest = max(queues), min(queues)
        if (
            longest - shortest > self.options.balance_abs_threshold
            and longest > self.options.balance_rel_threshold * shortest
        ):
            shortest_queue: list[Cost] = [(queue,) for queue in queues]
            return self.cheapest(query, loads, shortest_queue, Reason.BALANCE)
        matched = query.chain.hit_tokens(max(load.hit_blocks for load in loads))
        if matched > self.options.cache_threshold * query.chain.prompt_tokens:
            best_match: list[Cost] = [(-load.hit_blocks, queue) for load, queue in zip(loads, queues, strict=True)]
            return self.cheapest(query, loads, best_match, Reason.CACHE)
        smallest_tree: list[Cost] = [(load.cached_blocks, queue) for load, queue in zip(loads, queues, strict=True)]
        return self.cheapest(query, loads, smallest_tree, Reason.BALANCE)
