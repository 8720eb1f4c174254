"""Preble's E2: exploit a long match, explore by cost otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.state.instance import InstanceLoad

EXPLOIT_SHARE = 0.5
BALANCE_RATIO = 2.0
"""Threshold and ratio of the paper."""


class PrebleOptions(PolicyOptions):
    """Parameters of policy ``preble``."""

    decode_s_per_token: float = Field(
        0.0, ge=0, description="load of one expected output token of a running request, in seconds of prefill"
    )


@dataclass(frozen=True)
class Preble(FleetPolicy):
    """Source: Preble (ICLR 2025), E2 (exploitation + exploration).

    A match longer than ``EXPLOIT_SHARE`` of the prompt: the instances with the longest match, the less loaded
    of them. Otherwise least of: prefill work assigned in the last minutes + prefill cost of what misses here +
    prefill cost of what the KV cache would evict for it. Load adjustment: an exploiting request explores when
    its instance carries more than ``BALANCE_RATIO`` times the load of the least loaded one. That also replicates hot
    prefixes, as its autoscaling of nodes does: the next request finds them on both instances, and takes the less
    loaded one. Load is the prefill work of the window and ``decode_s_per_token`` for what running requests decode.
    """

    options: PrebleOptions = field(default_factory=PrebleOptions)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        longest = max(load.hit_blocks for load in loads)
        work_s = [self._work_s(query, load) for load in loads]
        matched = query.chain.hit_tokens(longest)
        if matched > EXPLOIT_SHARE * query.chain.prompt_tokens:
            costs: list[Cost] = [(-load.hit_blocks, busy_s) for load, busy_s in zip(loads, work_s, strict=True)]
            best_s = min(busy_s for load, busy_s in zip(loads, work_s, strict=True) if load.hit_blocks == longest)
            least_s = min(work_s)
            if least_s == 0 or best_s <= BALANCE_RATIO * least_s:
                return self.cheapest(query, loads, costs, Reason.CACHE)
        costs = [(busy_s + self._added_s(query, load),) for load, busy_s in zip(loads, work_s, strict=True)]
        return self.cheapest(query, loads, costs, Reason.COST)

    def _work_s(self, query: RouteQuery, load: InstanceLoad) -> float:
        """Prefill of the window, and what the running requests will decode, were they decoded one by one."""
        decode_tokens = load.running_requests * query.expected_output_tokens
        prefill_s = load.window_tokens / load.prefill_tokens_per_s
        return prefill_s + self.options.decode_s_per_token * decode_tokens

    def _added_s(self, query: RouteQuery, load: InstanceLoad) -> float:
        """The cost of the request to the instance: its prefill, and the reuse lost by eviction."""
        uncached_tokens = query.chain.uncached_tokens(load.hit_blocks)
        cached_tokens = load.cached_blocks * query.chain.block_tokens
        evicted_tokens = min(uncached_tokens, max(0, cached_tokens + uncached_tokens - load.kv_capacity_tokens))
        return (uncached_tokens + evicted_tokens) / load.prefill_tokens_per_s
