"""A trace sent through a live endpoint: open loop, at the trace's own times, every request accounted for.

Open loop means that nothing waits for answers: a fleet that falls behind meets the same arrivals as one that does
not. Prompts share text exactly as the trace's block ids say.

**Sped-up fleets.** Emulated instances may run ``time_scale`` engine seconds in a second. A replay with the same
time scale sends that much faster, asks for a TTFT SLO that much tighter (``x-slo-ttft-ms`` is in milliseconds of the
clock) and reports engine seconds. The router must be told as well: prefill rates times the scale; SLO, decode stall
and hotness window divided by it (``simulation.time_scale`` does that for its settings).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from simulation.answer_stream import AnswerStream
from simulation.errors import SimulationError
from simulation.fleet_probe import FleetProbe
from simulation.http_client import HttpClient, HttpClientError, Response
from simulation.prompts import PromptWriter
from simulation.replay_report import UNKNOWN_INSTANCE, ReplayedRequest, ReplayRecord
from simulation.traces import Trace, TraceRequest


class Endpoint(StrEnum):
    """What requests are sent as."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKEN_IDS = "token-ids"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is sent."""

    url: str
    """Base URL, without ``/v1``."""
    model: str | None = None
    """None: the first one that ``/v1/models`` lists."""
    endpoint: Endpoint = Endpoint.CHAT
    slo_ttft_s: float = 5.0
    """In engine seconds; sent along as ``x-slo-ttft-ms``."""
    time_scale: float = 1.0
    """Engine seconds in a second of the clock."""
    skip_requests: int = 0
    """Requests at the start that warm caches up and stay out of the figures."""
    timeout_s: float = 3600.0
    """Time for one answer, in engine seconds."""
    salt: str = ""
    """Another salt, other texts: a second replay then finds nothing cached by the first."""
    api_key: str | None = None
    sample_interval_s: float = 1.0
    """Time between looks at the fleet's load, seconds of the clock."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay has come."""

    total: int
    sent: int
    answered: int
    failed: int
    on_time: int

    @property
    def in_flight(self) -> int:
        return self.sent - self.answered - self.failed


class ReplayError(SimulationError):
    """The endpoint cannot be replayed against; says why."""


async def replay(
    trace: Trace,
    options: ReplayOptions,
    *,
    on_progress: Callable[[ReplayProgress], None] = lambda _progress: None,
    stop: asyncio.Event | None = None,
) -> ReplayRecord:
    """Send every request of the trace and wait for every answer.

    When ``stop`` is set, nothing more is sent and what is in flight is given up; it counts as failed.

    Raises:
        ReplayError: the endpoint does not answer, or serves no model.
    """
    run = _Replay(trace, options, on_progress)
    return await run.record(stop or asyncio.Event())


class _Replay:
    def __init__(self, trace: Trace, options: ReplayOptions, on_progress: Callable[[ReplayProgress], None]) -> None:
        self._trace = trace
        self._options = options
        self._on_progress = on_progress
        self._client = HttpClient(options.url)
        self._writer = PromptWriter(trace.block_tokens, options.salt)
        self._loop = asyncio.get_running_loop()
        self._results: list[ReplayedRequest] = []
        self._sent = self._answered = self._on_time = 0
        self._first_arrival_s = trace.requests[0].arrival_s if trace.requests else 0.0
        self._model = options.model or ""

    async def record(self, stop: asyncio.Event) -> ReplayRecord:
        options, probe = self._options, FleetProbe(self._client, self._options.sample_interval_s)
        try:
            self._model = options.model or await self._first_model()
            await probe.look()
            watching = asyncio.create_task(probe.watch())
            try:
                await self._send_all(stop)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await probe.look()
        finally:
            self._client.close()
        return ReplayRecord(
            trace=self._trace.name,
            url=options.url,
            rate_per_s=self._trace.rate_per_s,
            time_scale=options.time_scale,
            slo_ttft_s=options.slo_ttft_s,
            skip_requests=options.skip_requests,
            requests=tuple(sorted(self._results, key=lambda request: request.index)),
            unsent=len(self._trace.requests) - self._sent,
            samples=tuple(probe.samples),
            migrations=probe.migrations,
        )

    async def _first_model(self) -> str:
        try:
            status, page = await self._client.read("/v1/models", self._authorization())
        except HttpClientError as error:
            raise ReplayError(f"{self._options.url}: {error}") from error
        with suppress(orjson.JSONDecodeError, KeyError, IndexError, TypeError):
            if status == 200:
                return str(orjson.loads(page)["data"][0]["id"])
        raise ReplayError(f"{self._options.url}/v1/models names no model (status {status}); give one")

    async def _send_all(self, stop: asyncio.Event) -> None:
        start_s = self._loop.time()
        sending: set[asyncio.Task[None]] = set()
        stopping = asyncio.create_task(stop.wait())
        try:
            for index, request in enumerate(self._trace.requests):
                due_s = start_s + self._offset_s(request)
                if due_s > self._loop.time():
                    await asyncio.wait([stopping], timeout=due_s - self._loop.time())
                else:
                    await asyncio.sleep(0)  # answers must be read even when everything is due at once
                if stop.is_set():
                    break
                task = asyncio.create_task(self._send(index, request, due_s))
                self._sent += 1
                sending.add(task)
                task.add_done_callback(sending.discard)
            while sending and not stop.is_set():
                await asyncio.wait([stopping, *sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            leftover = tuple(sending)
            for task in leftover:
                task.cancel()
            await asyncio.gather(stopping, *leftover, return_exceptions=True)

    def _offset_s(self, request: TraceRequest) -> float:
        return (request.arrival_s - self._first_arrival_s) / self._options.time_scale

    async def _send(self, index: int, request: TraceRequest, due_s: float) -> None:
        """Send one request and note what became of it, whatever that is."""
        failure: str | None = "given up: the replay was stopped"
        response: Response | None = None
        stream = AnswerStream(self._loop.time)
        body = self._body(request)
        sent_s = self._loop.time()
        try:
            async with asyncio.timeout(self._options.timeout_s / self._options.time_scale):
                response = await self._client.request(
                    "POST", self._options.endpoint.path, body, self._headers(), stream.feed
                )
            stream.close()
            failure = _failure(response, stream)
        except TimeoutError:
            failure = "timeout"
        except HttpClientError as error:
            failure = f"connection: {error}"
        finally:
            self._note(index, request, due_s, sent_s, failure, response, stream)

    def _note(
        self,
        index: int,
        request: TraceRequest,
        due_s: float,
        sent_s: float,
        failure: str | None,
        response: Response | None,
        stream: AnswerStream,
    ) -> None:
        scale = self._options.time_scale
        headers = response.headers if response is not None else {}
        first_s, end_s = stream.first_content_s, self._loop.time()
        details = stream.usage.get("prompt_tokens_details") or {}
        result = ReplayedRequest(
            index=index,
            arrival_s=self._offset_s(request) * scale,
            lag_s=(sent_s - due_s) * scale,
            input_tokens=request.input_tokens,
            failure=failure,
            instance_id=headers.get("x-dualmap-instance", UNKNOWN_INSTANCE),
            attempts=_whole(headers.get("x-dualmap-attempts"), 1),
            ttft_s=None if first_s is None else (first_s - sent_s) * scale,
            e2e_s=None if failure is not None else (end_s - sent_s) * scale,
            prompt_tokens=_whole(stream.usage.get("prompt_tokens"), 0),
            completion_tokens=_whole(stream.usage.get("completion_tokens"), 0),
            cached_tokens=_whole(details.get("cached_tokens"), 0),
        )
        self._results.append(result)
        self._answered += failure is None
        self._on_time += failure is None and (result.ttft_s or 0.0) <= self._options.slo_ttft_s
        failed = len(self._results) - self._answered
        self._on_progress(ReplayProgress(len(self._trace.requests), self._sent, self._answered, failed, self._on_time))

    def _body(self, request: TraceRequest) -> bytes:
        prompt: dict[str, Any]
        if self._options.endpoint is Endpoint.CHAT:
            prompt = {"messages": [{"role": "user", "content": self._writer.message(request)}]}
        elif self._options.endpoint is Endpoint.COMPLETIONS:
            prompt = {"prompt": self._writer.text(request)}
        else:
            prompt = {"prompt": self._writer.token_ids(request)}
        return orjson.dumps(
            {
                "model": self._model,
                **prompt,
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _headers(self) -> dict[str, str]:
        slo_ms = self._options.slo_ttft_s * 1000 / self._options.time_scale
        return {"x-slo-ttft-ms": str(max(1, round(slo_ms))), **self._authorization()}

    def _authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._options.api_key}"} if self._options.api_key else {}


def _failure(response: Response, stream: AnswerStream) -> str | None:
    """Why a complete response is no answer; None if it is one."""
    if response.status != 200:
        return f"status {response.status}"
    if stream.error is not None:
        return f"error in the stream: {stream.error}"
    if not stream.done:
        return "the stream ended early"
    if stream.first_content_s is None:
        return "no content"
    return "aborted by the instance" if stream.finish_reason == "abort" else None


def _whole(value: object, default: int) -> int:
    try:
        return int(value)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return default
