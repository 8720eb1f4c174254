"""Settings of one router replica."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from dualmap.runtime.certificates import ServerFiles, server_files
from dualmap.runtime.pool_settings import ApiKey, BaseUrl
from dualmap.runtime.tenant_settings import Name

CUT_OFF_S = 3.0
"""Beyond the drain timeout, for clients to read the error that cut their request off."""
FLUSH_TIMEOUT_S = 5.0
"""Beyond that, for the outbox to be delivered to the store."""
LEAVING_S = 3.0
"""Beyond that, to give the leases up and to end."""


ENGINE_PATHS = (
    "/*weight*",
    "/abort_requests",
    "/collective_rpc",
    "/emulator",
    "/fault_tolerance",
    "/get_world_size",
    "/is_*",
    "/kv_event_sources",
    "/pause",
    "/release_*",
    "/reset_*",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/sleep",
    "/start_*",
    "/stop_*",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
)
"""Paths by which vLLM's server, or an emulated one, is managed, or shows how it is run."""

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
"""An origin as browsers send it: no path, and no slash at the end."""


CertificateUse = Literal["connections", "inference", "admin"]

Level = Annotated[str, Field(pattern=r"^(debug|info|warning|error)$")]


class AdminSettings(BaseModel):
    """One administrator."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name = Field(description="name of the administrator in logs; never the key itself")
    key: ApiKey | None = Field(None, description="the key")
    sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal, in place of the key"
    )
    role: Literal["admin", "reader"] = Field("admin", description="admin: may change everything; reader: only look")

    @model_validator(mode="after")
    def _has_a_key(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"administrator {self.name!r} needs either key or sha256")
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is None:
            return bytes.fromhex(self.sha256 or "")
        return hashlib.sha256(self.key.get_secret_value().encode()).digest()


Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Signatures with public keys alone: a verifier of one cannot make one."""


class JwtSettings(BaseModel):
    """One issuer of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    issuer: str = Field(min_length=1, description="the issuer, as tokens name it (iss)")
    audience: tuple[str, ...] = Field(min_length=1, description="audiences that are accepted (aud)")
    keys_url: str | None = Field(
        None, pattern=r"^https?://\S+$", description="URL of the public keys of the issuer (a JWK set)"
    )
    keys_file: Path | None = Field(None, description="file with these, in place of the URL; read again at intervals")
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256", "EdDSA"), min_length=1, description="algorithms of signatures that are accepted (alg)"
    )
    tenant_claim: str = Field("tenant", min_length=1, description="claim that names the tenant")
    class_claim: str | None = Field(None, min_length=1, description="claim that names the priority class")
    leeway_s: float = Field(30.0, ge=0, le=600, description="how much clocks may differ, seconds")
    refresh_s: float = Field(300.0, ge=10, description="how often the keys are read again, seconds")

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        if (self.keys_url is None) == (self.keys_file is None):
            raise ValueError(f"issuer {self.issuer!r} needs either keys_url or keys_file")
        return self


class BatchSettings(BaseModel):
    """Files and batches (OpenAI's Batch API)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage: str | None = Field(
        None,
        min_length=1,
        description="folder of files and batches, or a URL of fsspec (s3://bucket/folder), the same for all replicas;"
        " without it there are none",
    )
    max_file_bytes: int = Field(200 << 20, ge=1024, description="largest file that a client uploads, bytes")
    max_stored_bytes: int = Field(
        10 << 30, ge=1024, description="bytes of all files of a tenant at most, answers of its batches among them"
    )
    max_files: int = Field(1000, ge=1, description="files of a tenant at most")
    max_lines: int = Field(50_000, ge=1, description="requests of a batch at most")
    max_open: int = Field(100, ge=1, description="batches of a tenant that are not over, at most")


class GatewaySettings(BaseModel):
    """A gateway in front of the routers that identifies clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    addresses: tuple[str, ...] = Field(
        (), description="addresses or networks (10.0.0.0/24) of the gateway: what it says of tenants is believed"
    )
    certificates: tuple[str, ...] = Field(
        (), description="names of client certificates of the gateway, see router.tls_client_ca"
    )
    tenant_header: str = Field(
        "x-tenant-id", pattern=r"^[a-z0-9-]+$", description="header field in which it names the tenant, in lower case"
    )
    class_header: str | None = Field(
        None, pattern=r"^[a-z0-9-]+$", description="header field in which it names the priority class (none: none does)"
    )

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if not (self.addresses or self.certificates):
            raise ValueError("name the gateway: addresses, or certificates")
        _ = self.networks
        return self

    @property
    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Raises ValueError: one of them is none."""
        return tuple(ip_network(each, strict=False) for each in self.addresses)


class RouterSettings(BaseModel):
    """How a replica listens, what it accepts, how long it waits. Replicas may differ in all of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port of the endpoint; 0 picks a free one")
    ops_port: int | None = Field(
        None, ge=0, le=65535, description="extra port of this replica alone, for health checks and scraping"
    )
    advertise_url: BaseUrl | None = Field(
        None,
        description="base URL at which other replicas and layerwise decoders reach this one's ops_port, or its port"
        " (none: by host; for 0.0.0.0 by the address of the interface that leads to the store)",
    )
    replica_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$", description="id of this replica; generated when left out"
    )
    log_level: str = Field(
        "info", pattern=r"^(debug|info|warning|error)$", description="log level of routers and workers"
    )
    log_levels: dict[str, Level] = Field(
        {}, description='log levels of single packages or modules: {"statestore": "debug"}'
    )
    log_format: Literal["text", "json"] = Field("text", description="form of the log lines of routers and workers")

    # keys ----------------------------------------------------------------------------------------------------
    api_keys: tuple[ApiKey, ...] = Field((), description="inference needs one of these keys when any is set")
    needs_key: bool = Field(
        False, description="inference needs a key even while none is known: for fleets whose tenants are in the store"
    )
    revoked_requests: Literal["finish", "end"] = Field(
        "finish", description="finish the requests under way whose key is revoked, or end them with an error"
    )
    limits_without_store: Literal["open", "closed"] = Field(
        "open",
        description="while the store is away, admit what draws from limits, by budgets of each replica that begin"
        " unused; or refuse it",
    )
    admin_key: ApiKey | None = Field(None, description="/admin needs this key, or one of admins, when any is set")
    open_admin: bool = Field(
        False,
        description="serve /admin and engine control without a key although clients need keys and other machines reach"
        " this replica: whoever reaches it may change limits and stop instances",
    )
    admin_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], ...] = Field(
        (),
        description="further host names (no port) by which browsers and tools reach /admin and /ui while these need no"
        " key: other names and pages of other origins are refused there",
    )
    jwt: tuple[JwtSettings, ...] = Field(
        (), description="issuers of tokens that clients may send in place of keys; needs the jwt extra of the package"
    )
    gateway: GatewaySettings | None = Field(
        None, description="gateway that names the tenants of its requests (none: no client is believed)"
    )
    admins: tuple[AdminSettings, ...] = Field((), description="administrators with keys of their own")
    upstream_api_key: ApiKey | None = Field(
        None, description="key that the instances require; replaces the client's authorization"
    )

    tenant_cache_secret: ApiKey | None = Field(
        None,
        description="secret from which the cache_salt of each tenant is made, so that tenants share no KV cache; the"
        " same on all replicas (none: they share it)",
    )

    # TLS -----------------------------------------------------------------------------------------------------
    tls_certificate: Path | None = Field(
        None,
        description="file with the certificate of the endpoint's port, and of the CAs between it and a root, PEM, read"
        " again when it changes (none: no TLS); ops_port always serves plain HTTP",
    )
    tls_key: Path | None = Field(None, description="file with the key of that certificate, PEM, without a password")
    tls_client_ca: Path | None = Field(
        None, description="file with the CAs whose client certificates are accepted, PEM (none: clients show none)"
    )
    tls_client_required_for: tuple[CertificateUse, ...] = Field(
        ("connections",),
        description="what needs a client certificate where tls_client_ca is set: connections (all of them), or"
        " inference, admin or both; empty: one that is shown is verified, and none is needed",
    )

    # paths ---------------------------------------------------------------------------------------------------
    forbidden_paths: tuple[str, ...] = Field(
        ENGINE_PATHS,
        description="paths that are not passed on to instances, nor what is below them; * stands for anything",
    )

    trust_transfers: bool = Field(
        False,
        description="clients may say where KV is loaded from and sent to: kv_transfer_params and ec_transfer_params of"
        " bodies, and the headers of sidecars (x-prefiller-host-port and its like); otherwise these are dropped",
    )

    # browsers ------------------------------------------------------------------------------------------------
    ui: bool = Field(True, description="the live page at /ui; its data need the admin key where one is set")
    cors_origins: tuple[Origin, ...] = Field(
        (), description="origins whose pages may call inference and /v1/models from a browser (https://HOST, or *)"
    )

    # limits --------------------------------------------------------------------------------------------------
    max_requests: int = Field(
        16_384,
        ge=1,
        description="requests in flight and held on this replica at most; half of what others leave, of one tenant",
    )
    max_connections: int = Field(20_000, ge=1, description="client connections at most, without those to ops_port")
    max_body_bytes: int = Field(32 << 20, ge=1024, description="largest request body, bytes")
    max_buffered_body_bytes: int = Field(
        1 << 30, ge=1024, description="bytes of request bodies in memory at most, of all clients together"
    )

    # waits ---------------------------------------------------------------------------------------------------
    client_timeout_s: float = Field(30.0, gt=0, description="time for a client to send its request, seconds")
    keep_alive_s: float = Field(75.0, gt=0, description="time a client connection may idle, seconds")
    connect_timeout_s: float = Field(2.0, gt=0, description="time to connect to an instance, seconds")
    first_byte_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time to the first byte of content after dispatch, seconds: for the whole answer if it does not"
        " stream, and then no other instance is tried. As long as clients of OpenAI's libraries wait: engines that hang"
        " are found much sooner (worker.stall_down_s), so this only bounds single requests that an engine forgot",
    )
    chunk_timeout_s: float = Field(120.0, gt=0, description="time between chunks of an answer, seconds")
    total_timeout_s: float = Field(3600.0, gt=0, description="time for a whole request, seconds")

    ask_usage: bool = Field(
        True,
        description="instances that do not send it unasked are asked for the usage of streams whose clients did not say"
        " whether they want it; it is removed from their streams",
    )
    late_requests: Literal["serve", "refuse"] = Field(
        "serve", description="serve late, or refuse, the requests that cannot meet their SLO any more"
    )

    # tokens --------------------------------------------------------------------------------------------------
    tokenize_timeout_s: float = Field(
        0.25, gt=0, description="time for a prompt's tokens, seconds; then it is cut by bytes (see pools.tokenizer)"
    )

    # retries -------------------------------------------------------------------------------------------------
    max_attempts: int = Field(
        3, ge=1, le=16, description="instances tried at most until an answer begins, or goes on after it broke off"
    )

    # answers that go on elsewhere ------------------------------------------------------------------------------
    continue_streams: Literal["tokens", "text", "off"] = Field(
        "tokens",
        description="how a stream goes on whose instance fails in the middle: by the ids of its tokens, which engines"
        " are asked for and clients do not see; by its text; or not at all",
    )
    native_relay: bool = Field(
        True,
        description="streams pass the native relay from their first token on, where it is built: a thread without the"
        " interpreter; the bytes are the same",
    )
    tell_continuations: bool = Field(
        False, description="a comment in the stream, which clients skip, says when it goes on elsewhere"
    )

    # shared state --------------------------------------------------------------------------------------------
    replica_lease_s: float = Field(
        6.0, gt=0, description="lease of a replica, seconds; a dead one's requests are released then"
    )

    # shutdown ------------------------------------------------------------------------------------------------
    settle_s: float = Field(2.0, ge=0, description="time between /ready turning off and the port closing, seconds")
    drain_timeout_s: float = Field(
        60.0, gt=0, description="time for requests in flight to finish, seconds; then they are cut"
    )

    # metrics -------------------------------------------------------------------------------------------------
    tenant_metrics: int = Field(
        100, ge=0, description="tenants that have metrics of their own at most; the others are counted together"
    )

    # logs and traces -----------------------------------------------------------------------------------------
    request_log: str | None = Field(
        None, min_length=1, description="file for one JSON line per request that ended; - is standard output"
    )
    tracing_url: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description="where spans are sent by OTLP over HTTP, such as http://collector:4318/v1/traces; needs the tracing"
        " extra of the package",
    )
    tracing_share: float = Field(
        0.01, ge=0, le=1, description="share of the requests that are traced where the client did not decide it"
    )

    # batches -------------------------------------------------------------------------------------------------
    batches: BatchSettings = Field(BatchSettings(), description="files, and requests that no client waits for")

    # recording -----------------------------------------------------------------------------------------------
    record_dir: Path | None = Field(
        None, description="folder for a recording of the traffic: lengths, times and salted block hashes, no text"
    )
    record_salt: SecretStr | None = Field(
        None, description="salt of recorded hashes, the same on all replicas to merge them; random when left out"
    )
    record_max_bytes: int = Field(
        1 << 30, ge=1 << 20, description="bytes of a replica's recording at most: the oldest half gives way"
    )
    record_minutes_of_hour: int = Field(
        60, ge=1, le=60, description="minutes of each hour, from its beginning, that are recorded"
    )

    @model_validator(mode="after")
    def _one_body_fits(self) -> Self:
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ValueError(
                "max_buffered_body_bytes must not be below max_body_bytes: such a body would never be accepted"
            )
        return self

    @model_validator(mode="after")
    def _admins_are_distinct(self) -> Self:
        for what, differing in (
            ("name", {each.name for each in self.admins}),
            ("key", {each.digest for each in self.admins}),
        ):
            if len(differing) < len(self.admins):
                raise ValueError(f"two of admins have one {what}")
        return self

    @model_validator(mode="after")
    def _issuers_are_distinct(self) -> Self:
        if len({each.issuer for each in self.jwt}) < len(self.jwt):
            raise ValueError("two of jwt have one issuer")
        return self

    @property
    def admin_is_open(self) -> bool:
        """Whether administration needs no key."""
        return self.admin_key is None and not self.admins

    @property
    def own_admin_key(self) -> str | None:
        """A key that replicas and commands use themselves, if possible of one who may change things; None where hashes
        alone are known."""
        if self.admin_key is not None:
            return self.admin_key.get_secret_value()
        known = sorted((each for each in self.admins if each.key is not None), key=lambda each: each.role)
        return known[0].key.get_secret_value() if known and known[0].key is not None else None

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        _ = self.tls
        return self

    @property
    def tls(self) -> ServerFiles | None:
        """The files of the endpoint's port; None without TLS."""
        required = "connections" in self.tls_client_required_for
        return server_files("router", self.tls_certificate, self.tls_key, self.tls_client_ca, requires_client=required)

    @property
    def stop_within_s(self) -> float:
        """A replica has ended by this time after a signal to stop. Killed earlier, it may leave its lease and
        reservations behind."""
        return self.settle_s + self.drain_timeout_s + CUT_OFF_S + FLUSH_TIMEOUT_S + LEAVING_S


def not_finite(section: BaseModel) -> Iterator[str]:
    """Dotted names of numbers that are infinite or not a number, which deadlines and the store's scripts cannot use."""
    for name, given in section:
        if isinstance(given, BaseModel):
            yield from (f"{name}.{inner}" for inner in not_finite(given))
        elif isinstance(given, tuple):
            parts = ((index, part) for index, part in enumerate(given) if isinstance(part, BaseModel))
            yield from (f"{name}.{index}.{inner}" for index, part in parts for inner in not_finite(part))
        elif isinstance(given, dict):
            yield from (f"{name}.{inner}" for inner, value in given.items() if not _is_finite(value))
        elif not _is_finite(given):
            yield name


def _is_finite(given: object) -> bool:
    return not isinstance(given, float) or math.isfinite(given)
