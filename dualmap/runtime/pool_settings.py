"""Settings of pools, their instances and the connections to these, and kinds of fields that several sections have."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from dualmap.runtime.discovery_settings import DiscoverySettings
from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.revisions.weights import LABEL
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.state.instance import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    MANY_REQUESTS,
    InstanceSpec,
    InstanceState,
    Role,
)

_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
_KEY_BLANKS = " \t\r\n"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PLACEHOLDER = re.compile(r"\{(host|port)(?:([+-])(\d{1,5}))?\}")


def _base_url(url: str) -> str:
    """The URL without its last slash; refused unless a server can be found there and a path be appended."""
    if (reason := why_no_base_url(url)) is not None:
        raise PydanticCustomError("base_url", "must be http://HOST:PORT: {reason}", {"reason": reason})
    return url.rstrip("/")


def why_no_base_url(url: str) -> str | None:
    """Why the URL is not that of a server, below which paths can be requested; None where it is."""
    if not re.match(r"https?://", url):
        return "it does not begin with http:// or https://"
    if _BLANK.search(url):  # before it is parsed: that drops line ends
        return "it contains a blank or a control character"
    if "@" in url.removeprefix("https://").removeprefix("http://").partition("/")[0]:
        return (
            "a user and a password in it are not used; where instances require a key, set router.upstream_api_key and"
            " worker.upstream_api_key"
        )
    if "?" in url or "#" in url:
        return "a query or a fragment cannot be part of it"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # of the port, too
        return str(error)
    if port == 0:
        return "no server has port 0"
    return None if host and _is_host(host) else "its host is missing or invalid"


def _is_host(host: str) -> bool:
    if ":" in host:  # urlsplit has found brackets around it
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return False
        return True
    try:
        ascii_host = host.encode("idna").decode()
    except UnicodeError:  # a label is empty, too long, or cannot be written in ASCII
        return False
    return len(ascii_host) <= 253 and _HOST_NAME.fullmatch(ascii_host) is not None


def _instance_id(instance_id: str) -> str:
    if instance_id in (".", ".."):  # what clients make of /admin/instances/..
        raise PydanticCustomError("instance_id", "must not be '.' or '..': it is part of a path")
    return instance_id


BaseUrl = Annotated[str, AfterValidator(_base_url)]
"""The URL of a server; a path, with its slash, is appended to it."""

InstanceId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$"), AfterValidator(_instance_id)]

MAX_KV_CAPACITY_TOKENS = 10**12
MAX_BLOCK_TOKENS = 10**5

# Bounds far above any machine, within which sums over a fleet stay exact and finite in the store.
PrefillRate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
KvCapacity = Annotated[int, Field(gt=0, le=MAX_KV_CAPACITY_TOKENS)]
DispatchWindow = Annotated[int, Field(gt=0, le=10**9)]
RunningRequests = Annotated[int, Field(gt=0, le=10**6)]
DataParallelRank = Annotated[int, Field(ge=0, le=65_535)]
RevisionLabel = Annotated[str, Field(pattern=f"^({LABEL})?$")]
QueuedRequests = Annotated[int, Field(ge=0, le=MANY_REQUESTS)]


def _as_sent(secret: SecretStr) -> SecretStr:
    """The key without blanks around it: a file that is mounted as a secret usually ends with a line break."""
    key = secret.get_secret_value().strip(_KEY_BLANKS)
    if not key:
        raise PydanticCustomError("key", "must not be empty")
    if _CONTROL.search(key):
        raise PydanticCustomError("key", "must not contain a line break or another control character")
    return SecretStr(key)


ApiKey = Annotated[SecretStr, AfterValidator(_as_sent)]
"""Never empty: a request without a key must not have the right one. One line: it is sent as a header field."""


class UpstreamSettings(BaseModel):
    """TLS towards instances. All routers and workers need the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_file: Path | None = Field(
        None, description="file (PEM) of the CA that signs instances' certificates, trusted beside the system's CAs"
    )
    certificate_file: Path | None = Field(
        None, description="file (PEM) of the client certificate shown to instances that want one"
    )
    key_file: Path | None = Field(
        None, description="file (PEM) of the client certificate's private key (none: in certificate_file)"
    )
    server_name: str | None = Field(
        None,
        min_length=1,
        description="name that the certificates of all instances have, where their URLs have others, such as addresses"
        " of pods (none: the URL's host)",
    )
    verify_name: bool = Field(
        True,
        description="false: a certificate of any name is accepted, if the CA of ca_file has signed it; the system's CAs"
        " are not trusted then",
    )

    @model_validator(mode="after")
    def _key_belongs_to_a_certificate(self) -> Self:
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file needs a certificate_file")
        return self

    @model_validator(mode="after")
    def _somebody_vouches_for_instances(self) -> Self:
        if not self.verify_name and self.ca_file is None:
            raise ValueError("verify_name false needs a ca_file: only its CA is trusted then")
        if not self.verify_name and self.server_name is not None:
            raise ValueError("server_name is the name to verify: leave it out, or leave verify_name at true")
        return self


def _endpoint_template(template: str) -> str:
    try:
        urlsplit(fill_endpoint(template, "host", 30_000))
        fits = re.fullmatch(r"(tcp://.+:\d+|ipc://.+)", fill_endpoint(template, "host", 30_000)) is not None
    except ValueError:
        fits = False
    if not fits:
        filled_in = "{host} and {port+10000} are filled in"
        raise PydanticCustomError("endpoint", "must be tcp://HOST:PORT; {told}", {"told": filled_in})
    return template


def fill_endpoint(template: str, host: str, port: int) -> str:
    """The endpoint for the instance at this address."""

    def filled(found: re.Match[str]) -> str:
        name, sign, offset = found.groups()
        if name == "host":
            return host
        return str(port + (int(offset or 0) if sign != "-" else -int(offset)))

    return _PLACEHOLDER.sub(filled, template)


EventEndpoint = Annotated[str, AfterValidator(_endpoint_template)]


class KvEventSettings(BaseModel):
    """Endpoints at which instances publish their KV events (vLLM's ``--kv-events-config``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: EventEndpoint = Field(
        description="ZeroMQ endpoint; {host} and {port} are those of the instance's URL, {port+10000} adds to it;"
        " a rank of data parallelism adds its number to the port, as vLLM does"
    )
    replay_endpoint: EventEndpoint | None = Field(
        None, description="endpoint for missed events, written the same way; without one a gap empties the view"
    )
    topic: str = Field("", description="topic that is published; empty: any")


class KvTierSettings(BaseModel):
    """Sizes of the tiers that keep KV blocks behind the devices of instances, in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host_tokens: KvCapacity | None = Field(
        None, description="host memory: vLLM's cpu_bytes_to_use, LMCache's CPU, over the bytes of a token (none: none)"
    )
    disk_tokens: KvCapacity | None = Field(None, description="a disk of the instance's own (none: none)")
    pool_tokens: KvCapacity | None = Field(
        None,
        description="a store that all instances share, its whole size: LMCache's remote, AscendStore (none: none)",
    )

    @property
    def sizes(self) -> Mapping[Tier, int]:
        """The tokens of each tier that there is, the nearest first."""
        given = {Tier.HOST: self.host_tokens, Tier.DISK: self.disk_tokens, Tier.POOL: self.pool_tokens}
        return {tier: tokens for tier, tokens in given.items() if tokens}


def _port_template(template: str) -> str:
    if not template.startswith("{port") or not fill_endpoint(template, "host", 30_000).isdecimal():
        raise PydanticCustomError("port", "must be a port, or {example}", {"example": "{port+1000}"})
    return template


PortTemplate = Annotated[str, AfterValidator(_port_template)]


class PullSettings(BaseModel):
    """Pulls of prefix caches between the instances of a pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(
        False, description="let instances pull what others have of a prompt, where the first token comes sooner so"
    )
    port: Annotated[int, Field(ge=1, le=65_535)] | PortTemplate | None = Field(
        None,
        description="port on which instances serve pulls, where they do not answer /server_info (none: those take no"
        " part); {port+1000} adds to that of the instance's URL; ranks of data parallelism add their number",
    )
    failure_policy: Literal["fail", "recompute"] | None = Field(
        None,
        description="kv_load_failure_policy of instances that do not answer /server_info (none: those take no part)",
    )


class InstanceSettings(BaseModel):
    """One configured instance. A field that is left out has its default; a KV capacity that the server reports wins."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    id: InstanceId = Field(description="stable id; changing it remaps its prefixes")
    url: BaseUrl = Field(description="base URL of the vLLM server")
    role: Role = Field(Role.MIXED, description="legs that the instance serves: prefill, decode, or both (mixed)")
    prefill_tokens_per_s: PrefillRate = Field(
        DEFAULT_PREFILL_TOKENS_PER_S, description="prior of the learned prefill rate"
    )
    kv_capacity_tokens: KvCapacity = Field(
        1_000_000, description="KV cache size in tokens, until the instance reports its own"
    )
    dispatch_window_tokens: DispatchWindow = Field(
        4096, description="room for dispatched, unprefilled tokens: two engine batches (max_num_batched_tokens)"
    )
    max_running_requests: RunningRequests = Field(256, description="dispatched and unfinished requests at most")
    max_queued_requests: QueuedRequests = Field(
        MANY_REQUESTS,
        description="held requests at most, one more gets 429 (the default is no limit: what is held is bounded by"
        " router.max_requests of each replica)",
    )
    data_parallel_rank: DataParallelRank | None = Field(
        None, description="one rank of the server at this URL, counted across all its nodes; none: the whole server"
    )
    revision: RevisionLabel = Field(
        "", description="label of its engine version, model revision and flags, see dualmap revisions (empty: none)"
    )
    kv_events: KvEventSettings | None = Field(None, description="where it publishes KV events; none: as its pool says")

    standby: bool = Field(False, description="parked from the start, until the autoscaler or an operator starts it")

    def spec(self) -> InstanceSpec:
        """The instance as a store keeps it: STARTING, until a health check succeeds, or parked."""
        own = {"id", "url", "kv_events", "standby"}
        same = InstanceSettings.model_fields.keys() - own  # a subclass may have fields of its own
        state = InstanceState.STANDBY if self.standby else InstanceState.STARTING
        return InstanceSpec(instance_id=self.id, url=self.url, state=state, **self.model_dump(include=same))


class AdapterSettings(BaseModel):
    """The room of each instance for LoRA adapters, and what loading one takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slots: int | None = Field(
        None, ge=1, le=10**6, description="adapters on the device, vLLM's max_loras (none: as the instance reports)"
    )
    host_slots: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="adapters in host memory, max_cpu_loras (none: as the instance reports, else as on the device)",
    )
    host_ms: int = Field(
        20, ge=0, le=10**6, description="time of an adapter of rank 16 from host memory to the device, until measured"
    )
    disk_ms: int = Field(
        500, ge=0, le=10**6, description="time of an adapter of rank 16 into host memory, until measured"
    )


class PoolSettings(BaseModel):
    """Instances that serve one model, and the names clients may call it by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="pool name, the Redis hash tag")
    model: str = Field("default", min_length=1, description="model name the instances serve")
    aliases: tuple[str, ...] = Field((), description="other names for the model")
    loras: tuple[str, ...] = Field((), description="LoRA adapters the instances serve")
    fallback: str | None = Field(
        None,
        description="pool that serves requests for this model while no instance here is ready, by its own model, for"
        " tenants that may use it (none: they get an error)",
    )
    adapters: AdapterSettings = Field(AdapterSettings(), description="the room of each instance for LoRA adapters")
    instances: tuple[InstanceSettings, ...] = Field((), description="instances known from the start")
    discovery: DiscoverySettings | None = Field(
        None, description="where the leading worker finds further instances (none: nowhere)"
    )
    autoscale: AutoscaleSettings | None = Field(None, description="how the pool changes its size (none: by hand)")
    tokenizer: Literal["instances"] | Path | None = Field(
        None,
        description="folder of the model's tokenizer files (tokenizer.json, tokenizer_config.json, chat template):"
        " routers cut prompts into the engine's own blocks of tokens, for which they need the extra tokens; instances:"
        " routers request the tokens of each prompt from an instance; none: routers cut prompts by bytes",
    )
    chat_template: Path | None = Field(
        None, description="file of the chat template, as vLLM's --chat-template (none: the model's own)"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template, as vLLM's --default-chat-template-kwargs"
    )
    kv_events: Literal["instances"] | KvEventSettings | None = Field(
        None,
        description="where instances publish KV events; instances: each is asked (GET /kv_event_sources, vLLM 0.32 or"
        " newer); none: nowhere",
    )
    hash_seed: str | None = Field(
        None,
        coerce_numbers_to_str=True,
        description="PYTHONHASHSEED of the instances, where it is set and not 0: their names of blocks follow from it"
        " (none: unset or 0)",
    )
    kv_tiers: KvTierSettings = Field(
        KvTierSettings(), description="tiers that instances keep KV blocks in behind their devices"
    )
    pulls: PullSettings = Field(PullSettings(), description="pulls of prefix caches between instances")
    connector: Literal["nixl", "mooncake", "mooncake-layerwise"] = Field(
        "nixl",
        description="KV connector of prefill and decode instances: the decoder pulls (nixl, mooncake), or it goes first"
        " and is sent the KV layer by layer (mooncake-layerwise)",
    )
    move_roles: bool | None = Field(
        None,
        description="whether the leader gives instances of a prefill or decode side that has room to the other while"
        " that one starves (none: with connector nixl, whose instances can do both, and without autoscale.decode)",
    )
    drain_within_s: float | None = Field(
        None,
        ge=0,
        description="time after which what a draining instance still has goes elsewhere, seconds: streams from where"
        " they are, other answers from their begin (none: it finishes them)",
    )
    staged_timeout_s: float = Field(
        240.0,
        gt=0,
        description="time for which a prefill instance surely keeps KV that is to be transferred, seconds: less than"
        " the connector's own timeout (480 s in vLLM); then a prompt is prefilled again",
    )
    transfer_timeout_s: float = Field(
        60.0,
        gt=0,
        description="time for the KV of a split request to reach its decode instance, seconds, with the wait for memory"
        " there; then the prompt is prefilled again for another one",
    )

    @model_validator(mode="after")
    def _scales_what_it_discovers(self) -> Self:
        if self.autoscale is not None and self.autoscale.actuator == "kubernetes" and self.discovery is None:
            raise ValueError("autoscale.actuator kubernetes needs discovery, which enters the pods that it starts")
        return self

    @model_validator(mode="after")
    def _changes_the_size_of_a_role_in_one_way(self) -> Self:
        if self.move_roles and self._scales_decoding:
            raise ValueError("move_roles and autoscale.decode both change how many instances decode: name one of them")
        return self

    def autoscale_of(self, *, decodes: bool) -> AutoscaleSettings | None:
        """The settings by which the number of the decode instances changes, or that of all others."""
        if self.autoscale is None or not decodes:
            return self.autoscale
        return self.autoscale.of_decode

    @property
    def _scales_decoding(self) -> bool:
        return self.autoscale is not None and self.autoscale.decode is not None

    @property
    def moves_roles(self) -> bool:
        """Whether the leader changes roles."""
        usual = self.connector == "nixl" and not self._scales_decoding
        return usual if self.move_roles is None else self.move_roles

    @property
    def has_kv_events(self) -> bool:
        """Whether any instance publishes KV events."""
        return self.kv_events is not None or any(each.kv_events is not None for each in self.instances)
