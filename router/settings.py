"""Settings of one router replica."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from scheduling.prompt import MAX_PARTS
from scheduling.settings import SchedulingSettings
from statestore.key import Key

OVERDUE_GRACE_S = 10.0
"""Within this an overdue request is granted: the leader's sweep, and a new leader if there is none."""

CUT_OFF_S = 3.0
"""Beyond the drain timeout, for clients to read the error that cut their request off."""
FLUSH_TIMEOUT_S = 5.0
"""Beyond that, for what is owed to the store to be delivered."""
LEAVING_S = 3.0
"""Beyond that, to give the leases up and to end."""


Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
"""As browsers send it: no path, and no slash at the end."""


class RouterSettings(BaseModel):
    """How a replica listens, what it lets in, how long it waits. Replicas may differ in all of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port of the endpoint; 0 picks a free one")
    ops_port: int | None = Field(
        None, ge=0, le=65535, description="extra port of this replica alone, for health checks and scraping"
    )
    replica_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$", description="id of this replica; made up when left out"
    )
    log_level: str = Field(
        "info", pattern=r"^(debug|info|warning|error)$", description="log level of routers and workers"
    )

    # keys ----------------------------------------------------------------------------------------------------
    api_keys: tuple[Key, ...] = Field((), description="inference needs one of these keys when any is set")
    admin_key: Key | None = Field(None, description="/admin needs this key when it is set")
    upstream_api_key: Key | None = Field(
        None, description="key the instances ask for; replaces the client's authorization"
    )

    # browsers ------------------------------------------------------------------------------------------------
    cors_origins: tuple[Origin, ...] = Field(
        (), description="origins whose pages may call inference and /v1/models from a browser (https://HOST, or *)"
    )

    # limits --------------------------------------------------------------------------------------------------
    max_requests: int = Field(4096, ge=1, description="requests in flight and held on this replica at most")
    max_connections: int = Field(8192, ge=1, description="client connections at most, without those to ops_port")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="largest request body, bytes")
    max_buffered_body_bytes: int = Field(
        1 << 30, ge=1024, description="bytes of request bodies in memory at most, of all clients together"
    )
    max_json_bytes: int = Field(
        8 << 20, ge=1024, description="largest JSON body without its strings of 64 KB and more, bytes"
    )
    max_json_values: int = Field(
        100_000,
        ge=100,
        description="objects, arrays and strings of a JSON body over 64 KB at most; ten numbers count as one",
    )
    max_prompt_parts: int = Field(
        MAX_PARTS, ge=1, description="messages, content parts, prompts or tools of a request at most, of each"
    )
    max_header_bytes: int = Field(64 << 10, ge=1024, description="largest request head, and largest trailer, bytes")
    max_headers: int = Field(128, ge=8, description="header fields of a request at most")
    buffer_bytes: int = Field(
        256 << 10, ge=4096, description="bytes of answers buffered per client before its instance is paused"
    )
    upstream_idle_connections: int = Field(256, ge=0, description="idle connections kept per instance at most")

    # waits ---------------------------------------------------------------------------------------------------
    client_timeout_s: float = Field(30.0, gt=0, description="time for a client to send its request, seconds")
    keep_alive_s: float = Field(75.0, gt=0, description="time a client connection may idle, seconds")
    upstream_idle_s: float = Field(4.0, gt=0, description="time an idle connection to an instance is kept, seconds")
    connect_timeout_s: float = Field(2.0, gt=0, description="time to connect to an instance, seconds")
    hold_timeout_s: float | None = Field(
        None,
        gt=0,
        description="time a request may wait to be granted, seconds (none: scheduling.max_hold_s, and 10 s more for the"
        " grant that order deadline gives then)",
    )
    first_byte_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time to the first byte of content after dispatch, seconds: for the whole answer if it does not"
        " stream, and then no other instance is tried",
    )
    chunk_timeout_s: float = Field(120.0, gt=0, description="time between chunks of an answer, seconds")
    total_timeout_s: float = Field(3600.0, gt=0, description="time for a whole request, seconds")

    ask_usage: bool = Field(
        True,
        description="instances are asked for the usage of streams whose clients did not say whether they want it; it is"
        " taken out of their streams",
    )
    late_requests: Literal["serve", "refuse"] = Field(
        "serve", description="what becomes of requests that cannot be answered within their SLO any more"
    )

    # retries -------------------------------------------------------------------------------------------------
    max_attempts: int = Field(3, ge=1, le=16, description="instances tried for a request at most")
    retry_budget_share: float = Field(
        0.2, ge=0, le=1, description="retries at most, as a share of requests; a refused connection costs none"
    )
    retry_budget_per_s: float = Field(10.0, ge=0, description="retries per second allowed beside that share")
    breaker_fault_limit: int = Field(5, ge=1, description="failures in a row that open an instance's breaker")
    breaker_cooldown_s: float = Field(5.0, gt=0, description="time an open breaker waits for its probe, seconds")
    breaker_max_cooldown_s: float = Field(60.0, gt=0, description="the longest such time, seconds; it doubles")

    # shared state --------------------------------------------------------------------------------------------
    replica_lease_s: float = Field(6.0, gt=0, description="a dead replica's requests are released after this, seconds")
    view_poll_s: float = Field(1.0, gt=0, description="an idle replica refreshes its view after this, seconds")
    held_poll_s: float = Field(1.0, gt=0, description="held requests are looked up this often, seconds")
    reconcile_s: float = Field(30.0, gt=0, description="leftovers of this replica are looked for this often, seconds")
    snapshot_max_age_s: float = Field(1.0, gt=0, description="fleet gauges are read from a snapshot this old, seconds")
    outbox_limit: int = Field(65_536, ge=16, description="transitions waiting for the store at most")

    # shutdown ------------------------------------------------------------------------------------------------
    settle_s: float = Field(2.0, ge=0, description="time between /ready turning off and the port closing, seconds")
    drain_timeout_s: float = Field(
        60.0, gt=0, description="time for requests in flight to finish, seconds; then they are cut"
    )

    # recording -----------------------------------------------------------------------------------------------
    record_dir: Path | None = Field(
        None, description="folder for a recording of the traffic: lengths, times and salted block hashes, no text"
    )
    record_salt: SecretStr | None = Field(
        None, description="salt of recorded hashes, the same on all replicas to merge them; random when left out"
    )

    explanations: int = Field(
        2048, ge=0, description="requests that ended last, kept to be explained; live ones always are"
    )

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ValueError(
                "max_buffered_body_bytes must not be below max_body_bytes: such a body would never be taken"
            )
        return self

    @property
    def stop_within_s(self) -> float:
        """A replica that is told to stop has ended by then: who kills it earlier may leave its lease and reservations
        behind."""
        return self.settle_s + self.drain_timeout_s + CUT_OFF_S + FLUSH_TIMEOUT_S + LEAVING_S

    def hold_timeout_of(self, scheduling: SchedulingSettings) -> float:
        """Time a request may wait to be granted, seconds: unless set, no shorter than the store may hold it."""
        if self.hold_timeout_s is not None:
            return self.hold_timeout_s
        return scheduling.max_hold_s + (OVERDUE_GRACE_S if scheduling.granting_order == "deadline" else 0.0)
