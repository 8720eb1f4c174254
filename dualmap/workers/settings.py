"""Settings of a worker process."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dualmap.runtime.pool_settings import ApiKey


class WorkerSettings(BaseModel):
    """How a worker leads, and when it takes instances down. Workers of one fleet should agree on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ops_host: str = Field("127.0.0.1", description="address of the worker's own /health and /metrics")
    ops_port: int | None = Field(
        None, ge=0, le=65535, description="port of the worker's /health and /metrics; 0: any free (none: not served)"
    )

    lease_s: float = Field(
        3.0, ge=0.2, le=3600, description="leadership lease, seconds; a dead leader is replaced within it"
    )

    health_interval_s: float = Field(1.0, gt=0, description="time between two checks of one instance, seconds")
    health_timeout_s: float = Field(1.0, gt=0, description="time for one health check, seconds")
    stall_down_s: float = Field(
        30.0,
        gt=0,
        description="time without progress after which an instance with running requests goes down, seconds: no prefill"
        " is seen to finish, and no token counter moves",
    )
    upstream_api_key: ApiKey | None = Field(None, description="key that the instances require, sent with checks")
