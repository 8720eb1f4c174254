"""Probing a vLLM server over HTTP: is it alive, what is it, does it make progress.

Never hangs, and raises only ``NotSentError``: every other error is an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
import orjson

from dualmap.runtime.open_files import out_of_files
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.estimates.load_prices import LoadReading
from dualmap.scheduling.state.model_names import ModelList
from dualmap.workers.engine_metrics import (
    AdapterReport,
    ServerRun,
    adapters_of,
    block_tokens_of,
    kv_capacity_of,
    loads_of,
    names_offloading,
    pulls_of,
    server_run_of,
)
from dualmap.workers.probe_errors import refused_status, unreached

CANARY_TIMEOUT_S = 10.0
"""Timeout of the one-token completion of a returning engine; one that needs longer is tried again with the next check.
"""
DROPPING_METHODS = ("eagle", "eagle3", "mtp")
"""Methods of speculation whose draft layers read the next token: vLLM drops the last block of a hit for them."""
FORMER_DROPPING_METHODS = (*DROPPING_METHODS, "dflash", "dspark")
"""The same up to vLLM 0.32."""
_MAX_VERSION_CHARS = 100
_MAX_BODY_BYTES = 4 << 20
"""A metrics page of a busy server is a few hundred kilobytes."""


class NotSentError(Exception):
    """This process has no file descriptor left for the probe, which says nothing about the server."""


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """One HTTP exchange: a status and a body, or why there is none."""

    status: int
    body: bytes
    error: str | None
    """None when the server answered, with any status."""
    sent: bool = True
    """False when this process could not even ask."""
    connected: bool = False
    """Whether a connection was opened for it; else it went over one that has been open since an earlier exchange."""
    refused: bool = False
    """Whether no connection could be opened for it: at once, not after a time."""
    late: bool = False
    """The server took longer than it was given."""

    @property
    def ok(self) -> bool:
        return self.error is None and 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Health:
    """Answer to one health check."""

    complaint: str | None
    """None if ``/health`` answered with success, else what is wrong."""
    connected: bool
    """Whether a connection was opened for it. If not, the server's process is the one of the last exchange."""
    asleep: bool = False
    """Whether the server says that its engine is paused or asleep: it is fine, and computes nothing."""
    refused: bool = False
    """Whether the connection was refused. A busy server lets a check wait; of one that is refused the process ended."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A server's report about itself; every field may be unknown."""

    version: str | None
    model_list: ModelList
    kv_capacity_tokens: int | None
    block_tokens: int | None = None
    """Tokens in one block of its KV cache."""
    max_num_batched_tokens: int | None = None
    """Token budget of one engine step. Reported by servers in development mode alone."""
    max_num_seqs: int | None = None
    """Most running requests. Reported by servers in development mode alone."""
    max_model_len: int | None = None
    """Prompt and output tokens of one request at most."""
    _: KW_ONLY
    adapter_slots: int | None = None
    """Adapters that it has on its device at a time."""
    adapter_host_slots: int | None = None
    """Adapters that it has in host memory. Reported by servers in development mode alone."""
    is_late: bool = False
    """Its ``/server_info`` did not answer in time: what it would report may be known later. For the first of these
    answers vLLM describes its whole machine, which takes a second or several; it goes on with that, and keeps it."""
    dropped_blocks: int | None = None
    """Blocks at the end of a hit that it computes again. Reported by servers in development mode alone."""

    @property
    def models(self) -> tuple[str, ...]:
        """The names that it lists, adapters included."""
        return tuple(self.model_list.models or ())


class LoadReport(NamedTuple):
    """A server's report about its loads from tiers."""

    by_tier: Mapping[Tier, LoadReading]
    """The counters of each tier."""
    is_native: bool
    """They are loads of vLLM's own offloading."""


class Prober:
    """One HTTP client for all instances of a pool; ``async with`` closes it."""

    def __init__(
        self,
        *,
        timeout_s: float,
        canary_timeout_s: float = CANARY_TIMEOUT_S,
        api_key: str | None = None,
        trust: InstanceTrust | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._canary_timeout_s = canary_timeout_s
        # Environment proxies lead out of a data centre, not to the instances in it.
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(max(timeout_s, canary_timeout_s), connect=timeout_s),
            # The checker bounds how many probes are open; waiting here would count against the server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0),
            follow_redirects=False,
            verify=(trust or InstanceTrust()).context,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def health(self, url: str) -> Health:
        """Whether ``/health`` answers with success. Raises NotSentError."""
        answer = await self._request("GET", f"{url}/health", self._timeout_s)
        return Health(_complaint(answer), answer.connected, refused=answer.refused)

    async def asleep(self, url: str) -> bool | None:
        """Whether the engine is paused or asleep, as ``/is_sleeping`` says of both; None where the server does not say,
        as one that is not in development mode. Raises NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/is_sleeping", self._timeout_s))
        if not answer.ok:
            return None
        try:
            found = orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            return None
        return found.get("is_sleeping") is True if isinstance(found, dict) else None

    async def run(self, url: str, rank: int | None = None) -> ServerRun | None:
        """The run of the server's process, by the tokens of one rank if that is given; None if its metrics cannot be
        read. Raises NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/metrics", self._timeout_s))
        return server_run_of(answer.body.decode(errors="replace"), rank) if answer.ok else None

    async def loads(self, url: str, rank: int | None = None) -> LoadReport | None:
        """The report of its loads from tiers; None if its metrics cannot be read. Raises NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/metrics", self._timeout_s))
        if not answer.ok:
            return None
        page = answer.body.decode(errors="replace")
        return LoadReport(loads_of(page, rank), names_offloading(page))

    async def pulls(self, url: str, rank: int | None = None) -> LoadReading | None:
        """The counters of its pulls from other instances; None if its metrics cannot be read, or have none. Raises
        NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/metrics", self._timeout_s))
        return pulls_of(answer.body.decode(errors="replace"), rank) if answer.ok else None

    async def version(self, url: str) -> str | None:
        """The server's version; None if it does not say. Raises NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/version", self._timeout_s))
        return version_of(answer.body) if answer.ok else None

    async def models(self, url: str) -> ModelList:
        """The model names that it lists. Raises NotSentError."""
        return _model_list(_answered(await self._request("GET", f"{url}/v1/models", self._timeout_s)))

    async def adapters(self, url: str) -> AdapterReport:
        """Its adapters, as far as it reports them. Raises NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/metrics", self._timeout_s))
        return adapters_of(answer.body.decode(errors="replace")) if answer.ok else AdapterReport()

    async def kv_event_sources(self, url: str) -> Any:
        """Where it publishes KV events, as it says itself (JSON); None where it says nothing. Raises NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/kv_event_sources", self._timeout_s))
        try:
            return orjson.loads(answer.body) if answer.ok else None
        except orjson.JSONDecodeError:
            return None

    async def server_info(self, url: str) -> bytes | None:
        """Its configuration as JSON, which vLLM tells in its development mode; None if it does not. Raises
        NotSentError."""
        answer = _answered(await self._request("GET", f"{url}/server_info?config_format=json", self._timeout_s))
        return answer.body if answer.ok else None

    async def facts(self, url: str, rank: int | None = None) -> EngineFacts:
        """The report of the server about itself, or about one of its ranks. Four requests: call rarely."""
        paths = ("/version", "/v1/models", "/metrics", "/server_info?config_format=json")
        version, models, metrics, info = await asyncio.gather(
            *(self._request("GET", f"{url}{path}", self._timeout_s) for path in paths)
        )
        text = metrics.body.decode(errors="replace") if metrics.ok else ""
        budget, sequences = scheduler_limits_of(info.body) if info.ok else (None, None)
        slots, host_slots = adapter_slots_in(info.body) if info.ok else (None, None)
        return EngineFacts(
            version=version_of(version.body) if version.ok else None,
            model_list=_model_list(models),
            kv_capacity_tokens=kv_capacity_of(text, rank),
            block_tokens=block_tokens_of(text),
            max_num_batched_tokens=budget,
            max_num_seqs=sequences,
            max_model_len=longest_of(models.body) if models.ok else None,
            adapter_slots=adapters_of(text).slots or slots,
            adapter_host_slots=host_slots,
            is_late=info.late,
            dropped_blocks=dropped_blocks_of(info.body) if info.ok else None,
        )

    async def canary(self, url: str, model: str) -> str | None:
        """None if the engine completes one token, else what is wrong.

        A refusal of the request itself (4xx: no such endpoint or model, a key needed) says nothing about the engine and
        counts as success. Raises NotSentError.
        """
        body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        answer = await self._request("POST", f"{url}/v1/completions", self._canary_timeout_s, body)
        if answer.error is None and 400 <= answer.status < 500:
            return None
        return _complaint(answer)

    async def _request(self, method: str, url: str, timeout_s: float, body: object = None) -> ProbeReply:
        connects: list[str] = []

        async def trace(event: str, _info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.started":
                connects.append(event)

        extensions = {"trace": trace}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, url, json=body, extensions=extensions) as response,
            ):
                content = bytearray()
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > _MAX_BODY_BYTES:
                        return ProbeReply(response.status_code, b"", f"answer longer than {_MAX_BODY_BYTES} bytes")
                return ProbeReply(response.status_code, bytes(content), None, connected=bool(connects))
        except TimeoutError:
            return ProbeReply(0, b"", f"no answer within {timeout_s:g} s", late=True)
        except Exception as error:  # no error of one instance may stop the checks of the others
            refused = isinstance(error, httpx.ConnectError)
            try:
                why = unreached(error, httpx.URL(url))
            except httpx.InvalidURL:
                why = f"{type(error).__name__}: {error}"
            return ProbeReply(0, b"", why, sent=not out_of_files(error), refused=refused)


def _answered(answer: ProbeReply) -> ProbeReply:
    if not answer.sent:
        raise NotSentError(answer.error)
    return answer


def _complaint(answer: ProbeReply) -> str | None:
    if _answered(answer).error is not None:
        return answer.error
    return None if answer.ok else refused_status(answer.status)


def _model_list(answer: ProbeReply) -> ModelList:
    return ModelList.of(_json_object(answer.body) if answer.ok else None, answer.status if answer.error is None else 0)


def version_of(body: bytes) -> str | None:
    """``version`` of a ``/version`` answer."""
    document = _json_object(body)
    version = document.get("version")
    return version if isinstance(version, str) and len(version) <= _MAX_VERSION_CHARS else None


def longest_of(body: bytes) -> int | None:
    """``max_model_len`` of the first model of a ``/v1/models`` answer."""
    listed = _json_object(body).get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    return _limit(first, "max_model_len", 10**8) if isinstance(first, dict) else None


def scheduler_limits_of(body: bytes) -> tuple[int | None, int | None]:
    """``max_num_batched_tokens`` and ``max_num_seqs`` of a ``/server_info`` answer."""
    config = _json_object(body).get("vllm_config")
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    if not isinstance(scheduler, dict):
        return None, None
    return _limit(scheduler, "max_num_batched_tokens"), _limit(scheduler, "max_num_seqs")


def adapter_slots_in(body: bytes) -> tuple[int | None, int | None]:
    """``max_loras`` and ``max_cpu_loras`` of a ``/server_info`` answer."""
    config = _json_object(body).get("vllm_config")
    adapters = config.get("lora_config") if isinstance(config, dict) else None
    if not isinstance(adapters, dict):
        return None, None
    return _limit(adapters, "max_loras"), _limit(adapters, "max_cpu_loras")


def dropped_blocks_of(body: bytes) -> int | None:
    """The blocks at the end of a hit that the server computes again, by a ``/server_info`` answer; None if that does
    not say. vLLM drops one where the draft layers of a speculative model read the next token, unless its names of
    blocks cover that too, as they do from 0.33 on without a KV connector."""
    config = _json_object(body).get("vllm_config")
    if not isinstance(config, dict) or "speculative_config" not in config:
        return None
    draft = config["speculative_config"]
    if not isinstance(draft, dict) or draft.get("disable_eagle_block_drop"):
        return 0
    if "disable_lookahead_block_hashes" not in draft:  # before 0.33
        return int(draft.get("method") in FORMER_DROPPING_METHODS)
    names_cover = not draft["disable_lookahead_block_hashes"] and config.get("kv_transfer_config") is None
    return int(draft.get("method") in DROPPING_METHODS and not names_cover)


def _limit(config: dict[str, object], name: str, most: int = 10**6) -> int | None:
    found = config.get(name)
    return found if isinstance(found, int) and 0 < found <= most else None


def _json_object(body: bytes) -> dict[str, object]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}
