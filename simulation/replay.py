"""A trace sent through a live endpoint: open loop, at the trace's own times, every request accounted for.

Open loop means that no request waits for answers: a fleet that falls behind gets the same arrivals as one that does
not. Times count from when a request was due, so a client that falls behind does not hide it. Prompts share text exactly
as the trace's block ids do.

**Sped-up fleets.** Emulated instances may run ``time_scale`` engine seconds in a second. A replay with the same time
scale sends that much faster, sets a TTFT SLO that much tighter (``x-slo-ttft-ms`` is in milliseconds of the clock) and
reports engine seconds. The router needs the same scale: prefill rates times the scale; SLO, decode stall and hotness
window divided by it (``simulation.time_scale`` does that for its settings).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import orjson

from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.answer_stream import AnswerStream
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.fleet_probe import FleetProbe
from dualmap.simulation.http_client import HttpClient, HttpClientError, Response
from dualmap.simulation.on_time import TPOT_SLO_S
from dualmap.simulation.replay_bodies import Endpoint, RequestBodies
from dualmap.simulation.replay_report import UNKNOWN_INSTANCE, ReplayedRequest, ReplayRecord
from dualmap.simulation.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is sent."""

    url: str
    """Base URL, without ``/v1``."""
    model: str | None = None
    """None: the first one that ``/v1/models`` lists."""
    endpoint: Endpoint = Endpoint.CHAT
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    """Rules of the requests' SLO, in engine seconds, which is sent along as ``x-slo-ttft-ms``; a request of the trace
    may have its own."""
    slo_tpot_s: float = TPOT_SLO_S
    """SLO of the time per output token, in engine seconds; it is reported, not sent."""
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
    """The endpoint cannot be replayed against; the message says why."""


class UnreachableError(ReplayError):
    """The endpoint does not answer."""

    exit_code = 1


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
    try:
        client = HttpClient(options.url)
    except ValueError as error:
        raise ReplayError(str(error)) from error
    try:
        model = options.model or await _first_model(client, options)
        return await _Replay(trace, options, model, client, on_progress).record(stop or asyncio.Event())
    finally:
        client.close()


async def _first_model(client: HttpClient, options: ReplayOptions) -> str:
    try:
        status, page = await client.read("/v1/models", _authorization(options))
    except HttpClientError as error:
        raise UnreachableError(f"{options.url}: {error}") from error
    with suppress(orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        if status == 200:
            return str(orjson.loads(page)["data"][0]["id"])
    if status == HTTPStatus.UNAUTHORIZED:
        raise ReplayError(f"{options.url} asks for {'another' if options.api_key else 'an'} API key: --api-key KEY")
    raise ReplayError(f"{options.url}/v1/models names no model (status {status}); give one: --model NAME")


def _authorization(options: ReplayOptions) -> dict[str, str]:
    return {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}


class _Replay:
    """One replay under way. Everything that was sent ends up in ``_results``, once."""

    def __init__(
        self,
        trace: Trace,
        options: ReplayOptions,
        model: str,
        client: HttpClient,
        on_progress: Callable[[ReplayProgress], None],
    ) -> None:
        self._trace = trace
        self._options = options
        self._client = client
        self._on_progress = on_progress
        self._bodies = RequestBodies(trace, model, options.endpoint, options.salt)
        self._authorization = _authorization(options)
        self._first_arrival_s = trace.requests[0].arrival_s if trace.requests else 0.0
        self._results: list[ReplayedRequest] = []
        self._sent = self._answered = self._on_time = 0

    async def record(self, stop: asyncio.Event) -> ReplayRecord:
        options, probe = self._options, FleetProbe(self._client, self._options.sample_interval_s)
        await probe.look()
        watching = asyncio.create_task(probe.watch())
        try:
            await self._send_all(stop)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await probe.look()
        return ReplayRecord(
            trace=self._trace.name,
            url=options.url,
            rate_per_s=self._trace.rate_per_s,
            time_scale=options.time_scale,
            slo_ttft_s=options.scheduling.slo_ttft_s,
            slo_tpot_s=options.slo_tpot_s,
            skip_requests=options.skip_requests,
            requests=tuple(sorted(self._results, key=lambda request: request.index)),
            unsent=len(self._trace.requests) - self._sent,
            samples=tuple(probe.samples),
            migrations=probe.migrations,
        )

    async def _send_all(self, stop: asyncio.Event) -> None:
        start_s = time.monotonic()
        sending: set[asyncio.Task[None]] = set()
        stopping = asyncio.create_task(stop.wait())
        try:
            for index, request in enumerate(self._trace.requests):
                due_s = start_s + self._offset_s(request)
                await self._wait_until(due_s, stopping)
                if stop.is_set():
                    break
                task = asyncio.create_task(self._send(index, request, self._bodies.take(), due_s))
                sending.add(task)
                task.add_done_callback(sending.discard)
            answers = asyncio.gather(*sending, return_exceptions=True)
            await asyncio.wait((stopping, answers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            leftover = tuple(sending)
            for task in leftover:
                task.cancel()
            await asyncio.gather(stopping, *leftover, return_exceptions=True)

    async def _wait_until(self, due_s: float, stopping: asyncio.Task[object]) -> None:
        """Wait for a request's time (or for the end), writing the bodies of the next ones meanwhile."""
        await asyncio.sleep(0)  # answers must be read even when all requests are due at once
        while (delay_s := due_s - time.monotonic()) > 0 and not stopping.done():
            if self._bodies.write_one_ahead():
                await asyncio.sleep(0)
            else:
                await asyncio.wait([stopping], timeout=delay_s)

    def _slo_s(self, request: TraceRequest) -> float:
        return slo_s(self._options.scheduling, request.input_tokens, request.slo_ttft_s)

    def _headers(self, request: TraceRequest) -> dict[str, str]:
        slo_ms = self._slo_s(request) * 1000 / self._options.time_scale
        return {"x-slo-ttft-ms": str(max(1, round(slo_ms))), **self._authorization}

    def _offset_s(self, request: TraceRequest) -> float:
        return (request.arrival_s - self._first_arrival_s) / self._options.time_scale

    async def _send(self, index: int, request: TraceRequest, body: bytes, due_s: float) -> None:
        """Send one request and record its result in any case."""
        self._sent += 1
        failure: str | None = "given up: the replay was stopped"
        response: Response | None = None
        stream = AnswerStream(time.monotonic)
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._options.timeout_s / self._options.time_scale):
                response = await self._client.request(
                    "POST", self._options.endpoint.path, body, self._headers(request), stream.feed
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
        first_s, end_s = stream.first_content_s, time.monotonic()
        details = stream.usage.get("prompt_tokens_details") or {}
        result = ReplayedRequest(
            index=index,
            arrival_s=self._offset_s(request) * scale,
            lag_s=(sent_s - due_s) * scale,
            input_tokens=request.input_tokens,
            slo_s=self._slo_s(request),
            failure=failure,
            instance_id=headers.get("x-dualmap-instance", UNKNOWN_INSTANCE),
            attempts=_whole(headers.get("x-dualmap-attempts")) or 1,
            expected_ttft_s=_expected_ttft_s(headers.get("x-dualmap-expected-ttft-ms"), scale),
            ttft_s=None if first_s is None else (first_s - due_s) * scale,
            e2e_s=None if failure is not None else (end_s - due_s) * scale,
            prompt_tokens=_whole(stream.usage.get("prompt_tokens")) or 0,
            completion_tokens=_whole(stream.usage.get("completion_tokens")) or 0,
            cached_tokens=_whole(details.get("cached_tokens")),
            expected_cached_tokens=_whole(headers.get("x-dualmap-cached-tokens")),
        )
        self._results.append(result)
        self._answered += failure is None
        self._on_time += result.on_time
        failed = len(self._results) - self._answered
        self._on_progress(ReplayProgress(len(self._trace.requests), self._sent, self._answered, failed, self._on_time))


def _failure(response: Response, stream: AnswerStream) -> str | None:
    """Why a complete response is no answer; None if it is one."""
    if response.status != 200:
        return f"status {response.status} {stream.error_code or ''}".rstrip()
    if stream.error is not None:
        return f"error in the stream: {stream.error}"
    if not stream.done:
        return "the stream ended early"
    if stream.first_content_s is None:
        return "no content"
    return "aborted by the instance" if stream.finish_reason == "abort" else None


def _expected_ttft_s(header_ms: str | None, time_scale: float) -> float | None:
    """The estimate in engine seconds; None if there is none, or nonsense."""
    try:
        expected_s = float(header_ms or "nan") / 1000 * time_scale
    except ValueError:
        return None
    return expected_s if math.isfinite(expected_s) else None


def _whole(value: object) -> int | None:
    try:
        return int(value)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return None
