"""Settings of a process of emulated servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.hybrid_kv_pool import groups_from
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.engine.settings import EngineSettings


class EmulatorSettings(EngineSettings):
    """One process of emulated vLLM servers, each on a port of its own."""

    model: str | None = Field(
        None, min_length=1, description="model name that the instances serve (none: the preset's)"
    )
    aliases: tuple[str, ...] = Field((), description="further names of the model, as vLLM's --served-model-name")
    loras: tuple[str, ...] = Field(
        (), description="LoRA adapters loaded from the start; others are loaded by /v1/load_lora_adapter"
    )
    runtime_loras: bool = Field(
        True, description="load LoRA adapters at run time, as vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="port of the first instance, the others follow; 0: any free")
    store_responses: bool = Field(
        False, description="keep responses to be read again, as vLLM with VLLM_ENABLE_RESPONSES_API_STORE"
    )
    scale_out: bool = Field(
        False, description="have the endpoints of vLLM's --enable-scale-out: without it they answer 403"
    )
    instances: int = Field(1, ge=1, le=1000, description="emulated instances in this process")
    data_parallel_size: int = Field(
        1, ge=1, le=64, description="engines behind each instance's port, named by X-data-parallel-rank"
    )
    time_scale: float = Field(
        1.0, gt=0, le=1000, description="engine seconds in one second of the clock; see also the replay's time scale"
    )
    max_queued_requests: int | None = Field(
        None, ge=0, description="waiting requests at most, one more gets 503 (none: no limit)"
    )
    stream_interval: int = Field(1, ge=1, description="tokens in a streamed chunk; the first token is sent at once")
    seed: int = Field(0, description="seed of answer lengths and texts")
    shutdown_timeout_s: float = Field(
        0.0, ge=0, description="time to finish running requests on SIGTERM, new ones get 500; 0: abort them, seconds"
    )
    kv_events_port_offset: int | None = Field(
        None,
        ge=1,
        le=32_767,
        description="KV events are published on an instance's port plus this, and replayed on that plus twice this"
        " (none: they are not)",
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = Field(
        "fail", description="what a request whose KV of another server is lost does: fail with 500, or prefill here"
    )
    peer_pulls: bool = Field(
        False,
        description="pull from each other's caches (remote_kv_source), as vLLM with a tier of type p2p, and answer"
        " /server_info as in its development mode",
    )

    cache_groups: tuple[str, ...] = Field(
        (),
        description="cache groups of a hybrid model beside full attention: window:TOKENS or state, with the tokens of a"
        " block behind another colon where these are a multiple of block_tokens",
    )

    def engine_config(self) -> EngineConfig:
        engine = super().engine_config()
        return replace(engine, cache_groups=groups_from(self.cache_groups, engine.block_tokens))

    @model_validator(mode="after")
    def _ports_exist(self) -> EmulatorSettings:
        if self.port and self.port + self.instances - 1 > 65535:
            raise ValueError(f"{self.instances} instances from port {self.port} on exceed port 65535")
        if self.peer_pulls and self.data_parallel_size > 1:
            raise ValueError("peer_pulls is emulated for servers of one engine alone: data_parallel_size must be 1")
        return self

    @property
    def served_model(self) -> str:
        """The model name that requests must carry."""
        return self.model or find_preset(self.preset).model
