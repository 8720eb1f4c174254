"""Settings of an engine model: a preset, and figures that a user may set instead of the preset's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.presets import PRESETS_IN_WORDS, find_preset
from dualmap.simulation.engine.step_time import StepCosts, TabledCosts


class CostSettings(BaseModel):
    """Step costs (see simulation.engine.step_time) that replace the preset's, one by one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    overhead_ms: float | None = Field(None, ge=0, description="fixed cost of a step, milliseconds")
    weights_ms: float | None = Field(None, ge=0, description="reading all weights once, milliseconds")
    token_us: float | None = Field(None, gt=0, description="linear layers for one token, microseconds")
    attention_pair_ns: float | None = Field(None, ge=0, description="one pair of attention in prefill, nanoseconds")
    sequence_us: float | None = Field(None, ge=0, description="one decoding sequence in a step, microseconds")
    context_token_ns: float | None = Field(None, ge=0, description="one token of context in decode, nanoseconds")
    prompt_ms: float | None = Field(None, ge=0, description="one request besides its steps, milliseconds")

    def applied_to(self, costs: StepCosts) -> StepCosts:
        """The costs with what is set here in place. Raises ValueError."""
        if isinstance(costs, TabledCosts) and (self.weights_ms is not None or self.token_us is not None):
            raise ValueError("weights_ms and token_us have no place in this engine: a table has its linear layers")
        wanted = {
            "overhead_s": (self.overhead_ms, 1e-3),
            "weights_s": (self.weights_ms, 1e-3),
            "token_s": (self.token_us, 1e-6),
            "attention_pair_s": (self.attention_pair_ns, 1e-9),
            "sequence_s": (self.sequence_us, 1e-6),
            "context_token_s": (self.context_token_ns, 1e-9),
            "prompt_s": (self.prompt_ms, 1e-3),
        }
        return replace(costs, **{name: value * unit for name, (value, unit) in wanted.items() if value is not None})


class TransferSettings(BaseModel):
    """Moves of KV between prefill and decode instances, in place of the preset's figures, one by one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_bytes_per_token: int | None = Field(None, ge=1, description="KV of one token over all layers, bytes")
    gb_per_s: float | None = Field(None, gt=0, description="bandwidth of an instance's link, gigabytes per second")
    latency_ms: float | None = Field(None, ge=0, description="time of every move besides its bytes, milliseconds")

    def applied_to(self, transfer: KvTransfer) -> KvTransfer:
        """The figures with what is set here in place."""
        wanted = {
            "bytes_per_token": self.kv_bytes_per_token,
            "bytes_per_s": None if self.gb_per_s is None else self.gb_per_s * 1e9,
            "latency_s": None if self.latency_ms is None else self.latency_ms / 1000,
        }
        own: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        return replace(transfer, **own)


_CHANGED = (
    "; in NAME:prefill_first decodes wait while prompts can be prefilled, as without chunked prefill;"
    " NAME:by_priority schedules by priority, as with --scheduling-policy priority"
)


class EngineSettings(BaseModel):
    """One emulated engine: a preset, and figures of one's own in place of the preset's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str = Field("qwen2.5-7b-910b4", description=f"engine model: {PRESETS_IN_WORDS}{_CHANGED}")
    kv_capacity_tokens: int | None = Field(None, gt=0, description="KV memory in tokens (none: the preset's)")
    block_tokens: int | None = Field(None, gt=0, description="tokens in a KV block (none: the preset's)")
    max_num_batched_tokens: int | None = Field(None, gt=0, description="token budget of a step (none: the preset's)")
    max_num_seqs: int | None = Field(None, gt=0, description="running requests at most (none: the preset's)")
    max_model_len: int | None = Field(None, gt=0, description="prompt and output tokens at most (none: the preset's)")
    costs: CostSettings = Field(CostSettings(), description="step costs in place of the preset's")
    transfer: TransferSettings = Field(TransferSettings(), description="moves of KV in place of the preset's figures")
    staged_timeout_s: float | None = Field(
        None, gt=0, description="time until staged KV that is not pulled is freed, seconds (none: vLLM's 480)"
    )

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, name: str) -> str:
        return find_preset(name).name

    @model_validator(mode="after")
    def _figures_fit_together(self) -> EngineSettings:
        self.engine_config()
        return self

    def engine_config(self) -> EngineConfig:
        """The preset's engine with what is set here in place."""
        engine = find_preset(self.preset).engine
        names = ["kv_capacity_tokens", "block_tokens", "max_num_batched_tokens", "max_num_seqs", "max_model_len"]
        names.append("staged_timeout_s")
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        costs, transfer = self.costs.applied_to(engine.costs), self.transfer.applied_to(engine.transfer)
        return replace(engine, costs=costs, transfer=transfer, **own)
