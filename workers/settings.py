"""Settings of a worker process."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from statestore.key import Key


class WorkerSettings(BaseModel):
    """How a worker leads and how often its jobs look. Workers of one fleet should agree on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ops_host: str = Field("127.0.0.1", description="address of the worker's own /health and /metrics")
    ops_port: int | None = Field(None, ge=0, le=65535, description="their port; 0 picks a free one, unset serves none")

    lease_ms: int = Field(3000, ge=200, description="leadership lease; a dead leader is replaced within it, ms")
    stop_timeout_s: float = Field(2.0, gt=0, description="time jobs get to stop when leadership ends, seconds")
    tick_timeout_s: float = Field(10.0, gt=0, description="longest single round of a job, seconds")
    backoff_max_s: float = Field(5.0, gt=0, description="longest pause after failed rounds, seconds")

    register_interval_s: float = Field(
        1.0, gt=0, description="how often the store is checked for lost members, seconds"
    )

    rebalance_interval_s: float = Field(1.0, gt=0, description="sweep over instances with held requests, seconds")
    rebalance_min_gap_s: float = Field(0.02, ge=0, description="pause between two triggered rounds, seconds")
    rebalance_max_moves: int = Field(256, ge=1, description="migrations in one round of one instance at most")

    overdue_interval_s: float = Field(1.0, gt=0, description="how often requests held too long are granted, seconds")

    hotness_interval_s: float = Field(1.0, gt=0, description="how often the arrival log is read, seconds")

    health_interval_s: float = Field(1.0, gt=0, description="time between two checks of one instance, seconds")
    health_timeout_s: float = Field(1.0, gt=0, description="time for one health check, seconds")
    health_jitter: float = Field(0.2, ge=0, le=0.9, description="random share by which check intervals vary")
    health_checks_per_s: float = Field(200.0, gt=0, description="checks per second at most; large fleets wait longer")
    health_concurrency: int = Field(64, ge=1, description="checks under way at once")
    health_down_after: int = Field(3, ge=1, description="failed checks in a row that take an instance down")
    health_up_after: int = Field(2, ge=1, description="good checks in a row that bring it back")
    upstream_api_key: Key | None = Field(None, description="key the instances ask for, sent with checks")
    health_canary: bool = Field(True, description="a returning instance must answer a one-token completion first")
    health_canary_timeout_s: float = Field(10.0, gt=0, description="time for that completion, seconds")
    stall_suspect_s: float = Field(15.0, gt=0, description="work pending and no finished prefill: look closer, seconds")
    stall_down_s: float = Field(30.0, gt=0, description="a suspect is down when its counters stand still, seconds")

    reap_interval_s: float = Field(1.0, gt=0, description="how often expired replica leases are looked for, seconds")
    reap_grace_s: float = Field(
        2.0, ge=0, description="no reaping this long after taking over or a store outage, seconds"
    )
    repair_interval_s: float = Field(15.0, gt=0, description="how often sums are recomputed from requests, seconds")
    evacuate_interval_s: float = Field(
        0.5, gt=0, description="how often held requests of departed instances move, seconds"
    )
    drain_interval_s: float = Field(1.0, gt=0, description="how often draining instances are looked at, seconds")

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> WorkerSettings:
        if self.stall_down_s < self.stall_suspect_s:
            raise ValueError("stall_down_s must not be smaller than stall_suspect_s")
        return self
