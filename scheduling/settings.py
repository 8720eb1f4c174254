"""Settings of the scheduling core."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PolicyName = Literal[
    "dualmap",
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


class SchedulingSettings(BaseModel):
    """How requests are placed. Replicas, workers and the simulator of one pool must agree on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field("dualmap", description="scheduling policy")
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
    expected_output_tokens: int = Field(256, ge=1, description="assumed answer length when a request sets no limit")
    decode_stall_s: float = Field(3.0, gt=0, description="no prefill for this long counts as a decode bottleneck")
    reserve_tolerance_tokens: int = Field(4096, ge=0, description="load change a reservation accepts unseen")
    queue_order: Literal["fifo"] = Field("fifo", description="which held request is granted first")
