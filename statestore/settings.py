"""Settings of the state store and of the pools whose state it keeps, and kinds of fields that others have too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AnyHttpUrl, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import PydanticCustomError

from scheduling.instance import DEFAULT_PREFILL_TOKENS_PER_S, InstanceSpec, InstanceState, Role
from scheduling.scale_settings import AutoscaleSettings
from statestore.url import parse_store_url

_BASE_URL = re.compile(r"https?://[^\s\x00-\x1f\x7f?#]*")
_KEY_BLANKS = " \t\r\n"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PORT = re.compile(r"\{port([+-]\d{1,5})?\}")


def _base_url(url: str) -> str:
    """The URL without its last slash; refused unless a server can be found there and a path be appended."""
    reason = "it has a blank, a control character, a query or a fragment, or does not begin with http:// or https://"
    if _BASE_URL.fullmatch(url):
        try:
            parsed = AnyHttpUrl(url)
            (parsed.host or "").encode("idna")
            if parsed.port:
                return url.rstrip("/")
            reason = "no server has port 0"
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
        except UnicodeError:  # which a look-up of the name would raise
            reason = "a part of its host is empty or too long"
    raise PydanticCustomError("base_url", "must be http://HOST:PORT: {reason}", {"reason": reason})


BaseUrl = Annotated[str, AfterValidator(_base_url)]
"""Where a server is; a path, with its slash, is appended to it."""

InstanceId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_:-][A-Za-z0-9_.:-]{0,127}$")]
"""It is part of a path, where clients take '.' and '..' for other things: so no dot comes first."""

MAX_KV_CAPACITY_TOKENS = 10**12
MAX_BLOCK_TOKENS = 10**5

# Bounds far above any machine, within which sums over a fleet stay exact and finite in the store.
PrefillRate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
KvCapacity = Annotated[int, Field(gt=0, le=MAX_KV_CAPACITY_TOKENS)]
DispatchWindow = Annotated[int, Field(gt=0, le=10**9)]
RunningRequests = Annotated[int, Field(gt=0, le=10**6)]
DataParallelRank = Annotated[int, Field(ge=0, le=65_535)]
QueuedRequests = Annotated[int, Field(ge=0, le=10**6)]


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


def _store_url(url: str) -> str:
    try:
        parse_store_url(url)
    except ValueError as error:
        raise PydanticCustomError("store_url", "{reason}", {"reason": str(error)}) from error
    return url


class StoreSettings(BaseModel):
    """Where the shared state lives."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_store_url)] = Field(
        "redis://127.0.0.1:6379/0",
        description="redis://, rediss://, redis+sentinel://, redis+cluster://, unix:// or embedded:///PATH;"
        " embedded:// and memory:// are for one process alone, for tests",
    )
    prefix: str = Field("dualmap", pattern=r"^[A-Za-z0-9_.-]+$", description="first part of every key")
    connect_timeout_s: float = Field(2.0, gt=0, description="time to connect to the store, seconds")
    command_timeout_s: float = Field(3.0, gt=0, description="time for one store call, seconds")


def _endpoint_template(template: str) -> str:
    if not re.fullmatch(r"tcp://.+:\d+|ipc://.+", _fill(template, "host", 30_000)):
        told = "{host} and {port+10000} are filled in"
        raise PydanticCustomError("endpoint", "must be tcp://HOST:PORT; {told}", {"told": told})
    return template


def _fill(template: str, host: str, port: int) -> str:
    return _PORT.sub(lambda found: str(port + int(found[1] or 0)), template.replace("{host}", host))


EventEndpoint = Annotated[str, AfterValidator(_endpoint_template)]


class KvEventSettings(BaseModel):
    """Where instances publish their KV events (vLLM's ``--kv-events-config``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: EventEndpoint = Field(
        description="ZeroMQ endpoint; {host} and {port} are those of the instance's URL, {port+10000} adds to it;"
        " a rank of data parallelism adds its number to the port, as vLLM does"
    )
    replay_endpoint: EventEndpoint | None = Field(
        None, description="endpoint for missed events, written the same way; without one a gap empties the view"
    )
    topic: str = Field("", description="topic that is published; empty: any")

    def endpoint_of(self, url: str, rank: int | None) -> str:
        """Where the instance of this base URL publishes."""
        return _endpoint(self.endpoint, url, rank)

    def replay_endpoint_of(self, url: str, rank: int | None) -> str | None:
        return None if self.replay_endpoint is None else _endpoint(self.replay_endpoint, url, rank)


def _endpoint(template: str, url: str, rank: int | None) -> str:
    server = AnyHttpUrl(url)
    filled = _fill(template, server.host or "", server.port or 0)
    if not rank:
        return filled
    if not filled.startswith("tcp://"):
        return f"{filled}_dp{rank}"
    address, _, base = filled.rpartition(":")
    return f"{address}:{int(base) + rank}"


class InstanceSettings(BaseModel):
    """One configured instance. A field that is left out has its default; a KV capacity that the server reports wins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: InstanceId = Field(description="stable id; changing it remaps its prefixes")
    url: BaseUrl = Field(description="base URL of the vLLM server")
    role: Role = Field(Role.MIXED, description="mixed, prefill or decode")
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
    max_queued_requests: QueuedRequests = Field(1024, description="held requests at most")
    data_parallel_rank: DataParallelRank | None = Field(
        None, description="one rank of the server at this URL, counted across all its nodes; none: the whole server"
    )
    kv_events: KvEventSettings | None = Field(None, description="where it publishes KV events; none: as its pool says")

    standby: bool = Field(False, description="parked from the start, until the autoscaler or an operator starts it")

    def spec(self) -> InstanceSpec:
        """The instance as a store keeps it: STARTING, until a health check succeeds, or parked."""
        own = {"id", "url", "kv_events", "standby"}
        same = InstanceSettings.model_fields.keys() - own  # a subclass may have fields of its own
        state = InstanceState.STANDBY if self.standby else InstanceState.STARTING
        return InstanceSpec(instance_id=self.id, url=self.url, state=state, **self.model_dump(include=same))


class PoolSettings(BaseModel):
    """Instances that serve one model, and the names clients may call it by."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="pool name, the Redis hash tag")
    model: str = Field("default", min_length=1, description="model name the instances serve")
    aliases: tuple[str, ...] = Field((), description="other names for the model")
    loras: tuple[str, ...] = Field((), description="LoRA adapters the instances serve")
    instances: tuple[InstanceSettings, ...] = Field((), description="instances known from the start")
    autoscale: AutoscaleSettings | None = Field(None, description="how the pool changes its size (none: by hand)")
    tokenizer: Literal["instances"] | Path | None = Field(
        None,
        description="folder of the model's tokenizer files (tokenizer.json, tokenizer_config.json, chat template):"
        " routers cut prompts into the engine's own blocks of tokens; instances: they are asked for the tokens of each"
        " prompt; none: by bytes",
    )
    chat_template: Path | None = Field(
        None, description="file of the chat template, as vLLM's --chat-template (none: the model's own)"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template, as vLLM's --default-chat-template-kwargs"
    )
    kv_events: KvEventSettings | None = Field(None, description="where instances publish KV events; none: nowhere")
    connector: Literal["nixl", "mooncake", "mooncake-layerwise"] = Field(
        "nixl",
        description="KV connector of prefill and decode instances: the decoder pulls (nixl, mooncake), or it goes first"
        " and is sent the KV layer by layer (mooncake-layerwise)",
    )
    move_roles: bool | None = Field(
        None,
        description="whether the leader gives instances of a prefill or decode side that has room to the other while"
        " that one starves (none: with connector nixl, whose instances can do both)",
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

    @property
    def moves_roles(self) -> bool:
        """Whether the leader changes roles."""
        return self.connector == "nixl" if self.move_roles is None else self.move_roles

    @property
    def has_kv_events(self) -> bool:
        """Whether any instance publishes KV events."""
        return self.kv_events is not None or any(each.kv_events is not None for each in self.instances)
