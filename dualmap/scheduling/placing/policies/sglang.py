"""SGLang's cache-aware policy: shortest queue when unbalanced, best match or smallest tree otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.settings import SglangSettings
from dualmap.scheduling.state.instance import InstanceLoad


@dataclass(frozen=True)
class Sglang(FleetPolicy):
    """Source: SGLang router and its successor smg, policy ``cache_aware``. Load is requests in flight.

    Unbalanced (max - min > ``balance_abs_threshold`` and max > ``balance_rel_threshold`` * min): shortest queue.
    Balanced: the best match if its rate exceeds ``cache_threshold``, else the smallest of the trees, one for each
    instance, of the prompts that were sent there. The blocks that the KV metadata lists stand for the size of a tree.
    """

    settings: SglangSettings = field(default_factory=SglangSettings)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        queues = [in_flight(load) for load in loads]
        longest, shortest = max(queues), min(queues)
        if (
            longest - shortest > self.settings.balance_abs_threshold
            and longest > self.settings.balance_rel_threshold * shortest
        ):
            shortest_queue: list[Cost] = [(queue,) for queue in queues]
            return self.cheapest(query, loads, shortest_queue, Reason.BALANCE)
        matched = query.chain.hit_tokens(max(load.hit_blocks for load in loads))
        if matched > self.settings.cache_threshold * query.chain.prompt_tokens:
            best_match: list[Cost] = [(-load.hit_blocks, queue) for load, queue in zip(loads, queues, strict=True)]
            return self.cheapest(query, loads, best_match, Reason.CACHE)
        smallest_tree: list[Cost] = [(load.cached_blocks, queue) for load, queue in zip(loads, queues, strict=True)]
        return self.cheapest(query, loads, smallest_tree, Reason.BALANCE)
