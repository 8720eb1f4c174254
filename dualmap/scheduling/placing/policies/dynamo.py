"""Dynamo's KV router: prefill blocks less overlap, plus decode blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.options import PolicyOptions
from dualmap.scheduling.state.instance import InstanceLoad


class DynamoOptions(PolicyOptions):
    """Parameters of policy ``dynamo``."""

    prefill_scale: float = Field(32.0, ge=0, description="weight of prefill blocks, relative to decode blocks")


VLLM_KV_AWARE = DynamoOptions(prefill_scale=1.0)
"""The defaults of vllm-router's policy ``kv_aware``, whose cost is Dynamo's: each cached block counts in full, and an
active request costs nothing beside its blocks. Source: vllm-project/router, RFC 294; its wheel 0.1.17 ran before the
same instances (``docs/research/evaluation.md``)."""


@dataclass(frozen=True)
class Dynamo(FleetPolicy):
    """Source: NVIDIA Dynamo, KV cache routing (router design document), at temperature 0.

    Least ``scale * max(active prefill + incoming - overlap, 0) + decode blocks``, all in blocks. Decode blocks are
    those of the running sequences, shared ones once where the instance reports them; the incoming request's own are the
    same everywhere and drop out.
    """

    options: DynamoOptions = field(default_factory=DynamoOptions)

    def pick(self, query: RouteQuery, loads: list[InstanceLoad]) -> Decision:
        chain, scale = query.chain, self.options.prefill_scale
        costs: list[Cost] = [
            (
                (
                    scale * max(load.pending_tokens + chain.prompt_tokens - chain.hit_tokens(load.hit_blocks), 0)
                    + load.running_tokens
                )
                / chain.block_tokens,
            )
            for load in loads
        ]
        return self.cheapest(query, loads, costs, Reason.COST)
