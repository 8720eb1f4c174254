"""Dynamo's KV router: prefill blocks less overlap, plus decode blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, credited_tokens
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.options import TierCredits
from dualmap.scheduling.state.instance import InstanceLoad


class DynamoOptions(TierCredits):
    """Parameters of policy ``dynamo``."""

    prefill_scale: float = Field(32.0, ge=0, description="weight of prefill blocks, relative to decode blocks")
    host_credit: float = Field(0.75, ge=0, le=1, description="weight of a block in host memory")
    disk_credit: float = Field(0.25, ge=0, le=1, description="weight of a block on disk")
    pool_credit: float = Field(0.5, ge=0, le=1, description="weight of a block in a shared store")


VLLM_KV_AWARE = DynamoOptions(prefill_scale=1.0, host_credit=1.0, disk_credit=1.0, pool_credit=1.0)
"""The defaults of vllm-router's policy ``kv_aware``, whose cost is Dynamo's: each cached block counts in full, and an
active request costs nothing beside its blocks. Source: vllm-project/router, RFC 294; its wheel 0.1.17 ran before the
same instances (``docs/research/evaluation.md``)."""


@dataclass(frozen=True)
class Dynamo(FleetPolicy):
    """Source: NVIDIA Dynamo, KV cache routing (router design document), at temperature 0.

    Least ``scale * max(active prefill + incoming - overlap, 0) + decode blocks``, all in blocks. Decode blocks are
    those of the running sequences, shared ones once where the instance reports them; the incoming request's own are the
    same everywhere and drop out. Blocks in tiers overlap by constants (its router's documentation, 1.7.0).
    """

    options: DynamoOptions = field(default_factory=DynamoOptions)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        chain, scale = query.chain, self.options.prefill_scale
        costs: list[Cost] = [
            (
                (
                    scale
                    * max(load.pending_tokens + chain.prompt_tokens - credited_tokens(chain, load, self.options), 0)
                    + load.running_tokens
                )
                / chain.block_tokens,
            )
            for load in loads
        ]
        return self.cheapest(query, loads, costs, Reason.COST)
