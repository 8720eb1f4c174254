"""Settings of the scheduling core."""

from __future__ import annotations

from typing import Literal, Self, get_args

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

PolicyName = Literal[
    "dualmap",
    "dualmap-wide",
    "dualmap-cache-affinity",
    "dualmap-least-loaded",
    "dualmap-min-ttft",
    "dualmap-no-rebalance",
    "round-robin",
    "least-loaded",
    "cache-affinity",
    "min-ttft",
    "preble",
    "dynamo",
    "sglang",
    "llm-d",
]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


class DualMapSettings(BaseModel):
    """Parameters of policy ``dualmap`` and of its ablation without rebalancing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    when_both_late: Literal["less-loaded", "larger-hit"] = Field(
        "less-loaded", description="which candidate is taken when neither can meet the SLO"
    )


class DualMapWideSettings(BaseModel):
    """Parameters of policy ``dualmap-wide``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recompute_weight: float = Field(3.0, ge=1, description="weight of a request's recompute beside work ahead of it")
    eviction_weight: float = Field(
        4.0,
        ge=0,
        description="how much more a recompute weighs where it evicts what others would have found",
    )
    rebalance: bool = Field(False, description="let held requests migrate to the second best instance")
    miss_penalty: float = Field(2.0, ge=0, description="cost of an expected miss, in TTFT SLOs")
    late_weight: float = Field(
        0.05, ge=0, le=1, description="weight of work that stepped behind, or that the last plan set aside"
    )


class PrebleSettings(BaseModel):
    """Parameters of policy ``preble``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exploit_share: float = Field(0.5, ge=0, le=1, description="matched share of the prompt above which reuse wins")
    eviction_weight: float = Field(1.0, ge=0, description="weight of evicted tokens beside computed ones")
    balance_ratio: float = Field(2.0, gt=1, description="load over the lightest instance's that ends exploiting")


class DynamoSettings(BaseModel):
    """Parameters of policy ``dynamo``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_scale: float = Field(32.0, ge=0, description="weight of prefill blocks beside decode blocks")


class SglangSettings(BaseModel):
    """Parameters of policy ``sglang``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_threshold: float = Field(0.3, ge=0, le=1, description="matched share of the prompt above which reuse wins")
    balance_abs_threshold: int = Field(64, ge=0, description="difference of requests in flight that is unbalanced")
    balance_rel_threshold: float = Field(1.5, ge=1, description="ratio of requests in flight that is unbalanced")


class LlmDSettings(BaseModel):
    """Parameters of policy ``llm-d``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_weight: float = Field(3.0, ge=0, description="weight of the prefix match")
    queue_weight: float = Field(2.0, ge=0, description="weight of the waiting queue")
    kv_weight: float = Field(2.0, ge=0, description="weight of the KV memory in use")


class SchedulingSettings(BaseModel):
    """How requests are placed. Replicas, workers and the simulator of one pool must agree on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field("dualmap-wide", description="scheduling policy")
    slo_ttft_s: float = Field(5.0, gt=0, description="target time to first token, seconds")
    block_tokens: int = Field(128, ge=1, le=4096, description="tokens in one prompt block")
    bytes_per_token: float = Field(4.0, gt=0, le=64, description="prior of the learned bytes per token")
    virtual_nodes: int = Field(128, ge=1, le=1024, description="anchor points of an instance on each ring")
    hotness_window_s: float = Field(120.0, gt=0, description="sliding window of the hotness tree, seconds")
    hotness_window_requests: int = Field(4096, ge=16, description="requests in the window at most")
    hotness_min_requests: int = Field(32, ge=1, description="requests seen before any prefix counts as hot")
    max_key_blocks: int = Field(64, ge=1, le=256, description="longest hash key, in blocks")
    hot_share_factor: float = Field(2.0, gt=0, description="a prefix is hot above this / ready instances")
    cold_share_factor: float = Field(1.0, gt=0, description="a hot prefix is cold below this / ready instances")
    expected_output_tokens: int = Field(
        256, ge=1, description="length of an answer that is reckoned with, or the request's limit where that is less"
    )
    decode_stall_s: float = Field(3.0, gt=0, description="no prefill for this long counts as a decode bottleneck")
    kv_weight_s: float = Field(
        4.0,
        ge=0,
        description="what a KV memory's worth of running context counts for beside prefill work, seconds, in"
        " policy dualmap-wide",
    )
    reserve_tolerance_tokens: int = Field(4096, ge=0, description="load change a reservation accepts unseen")
    queue_order: Literal["auto", "fifo", "deadline"] = Field(
        "auto", description="which held request is granted first; auto: deadline for dualmap-wide, else fifo"
    )
    max_hold_s: float = Field(
        300.0, gt=0, description="longest time a request is held, seconds; then order deadline dispatches it anyway"
    )
    max_late_work_s: float = Field(
        30.0,
        ge=0,
        description="prefill work that an instance takes on at once for requests that stepped behind, seconds; more is"
        " refused",
    )
    late_work_share: float = Field(
        0.1, gt=0, le=1, description="share of an instance's time that overdue requests get in the long run"
    )
    holder_marks: int = Field(200_000, ge=1, description="prefixes whose last holders are remembered, per generation")
    dualmap: DualMapSettings = Field(default_factory=DualMapSettings, description="parameters of policy dualmap")
    dualmap_wide: DualMapWideSettings = Field(
        default_factory=DualMapWideSettings, description="parameters of policy dualmap-wide"
    )
    preble: PrebleSettings = Field(default_factory=PrebleSettings, description="parameters of policy preble")
    dynamo: DynamoSettings = Field(default_factory=DynamoSettings, description="parameters of policy dynamo")
    sglang: SglangSettings = Field(default_factory=SglangSettings, description="parameters of policy sglang")
    llm_d: LlmDSettings = Field(default_factory=LlmDSettings, description="parameters of policy llm-d")

    @property
    def granting_order(self) -> Literal["fifo", "deadline"]:
        """``queue_order`` with ``auto`` resolved: the paper's DualMap and the peers' policies are first come, first
        served; ``dualmap-wide`` is made for deadlines."""
        if self.queue_order == "auto":
            return "deadline" if self.policy == "dualmap-wide" else "fifo"
        return self.queue_order

    @property
    def looks_beyond(self) -> bool:
        """Whether the policy is one that looks past its candidates, so that stores remember holders of prefixes."""
        return self.policy == "dualmap-wide"

    @property
    def fingerprint(self) -> str:
        """Eight hex digits that tell whether two processes have the same settings, as all of a fleet must."""
        return xxhash.xxh32_hexdigest(self.model_dump_json().encode())

    @model_validator(mode="after")
    def _hot_is_above_cold(self) -> Self:
        if self.cold_share_factor > self.hot_share_factor:
            raise ValueError("cold_share_factor must not exceed hot_share_factor: prefixes would flap between the two")
        return self
