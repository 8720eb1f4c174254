"""Settings of the state store and of the pools whose state it keeps."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from scheduling.instance import InstanceSpec, Role

BaseUrl = Annotated[str, Field(pattern=r"^https?://"), AfterValidator(lambda url: url.rstrip("/"))]
"""Where a server is; a path, with its slash, is appended to it."""


class StoreSettings(BaseModel):
    """Where the shared state lives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss://, redis+sentinel://, redis+cluster://, embedded:// or memory://",
    )
    prefix: str = Field("dualmap", pattern=r"^[A-Za-z0-9_.-]+$", description="first part of every key")
    connect_timeout_s: float = Field(2.0, gt=0, description="time to connect to the store, seconds")
    command_timeout_s: float = Field(1.0, gt=0, description="time for one store call, seconds")


class InstanceSettings(BaseModel):
    """One configured instance. What is left out is asked of the server or taken from its preset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$", description="stable id; moves of an id move its keys")
    url: BaseUrl = Field(description="base URL of the vLLM server")
    role: Role = Field(Role.MIXED, description="mixed, prefill or decode")
    prefill_tokens_per_s: float = Field(8000.0, gt=0, description="prior of the learned prefill rate")
    kv_capacity_tokens: int = Field(
        1_000_000, gt=0, description="KV cache size in tokens, until the instance reports its own"
    )
    dispatch_window_tokens: int = Field(
        4096, gt=0, description="room for dispatched, unprefilled tokens: two engine batches (max_num_batched_tokens)"
    )
    max_running_requests: int = Field(256, gt=0, description="dispatched and unfinished requests at most")
    max_queued_requests: int = Field(1024, ge=0, description="held requests at most")

    def spec(self) -> InstanceSpec:
        """The instance as a store keeps it: STARTING, until a health check succeeds."""
        same = InstanceSettings.model_fields.keys() - {"id", "url"}  # a subclass may have fields of its own
        return InstanceSpec(instance_id=self.id, url=self.url, **self.model_dump(include=same))


class PoolSettings(BaseModel):
    """Instances that serve one model, and the names clients may call it by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="pool name, the Redis hash tag")
    model: str = Field("default", min_length=1, description="model name the instances serve")
    aliases: tuple[str, ...] = Field((), description="other names for the model")
    loras: tuple[str, ...] = Field((), description="LoRA adapters the instances serve")
    instances: tuple[InstanceSettings, ...] = Field((), description="instances known from the start")
