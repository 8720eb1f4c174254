"""A trace sent through a live endpoint, every request accounted for.

When each request is sent is decided by ``simulation.workload.arrivals``: at the trace's own times (an open loop: a
fleet that falls behind gets the same arrivals as one that does not), a think time after the answer before, or by
clients that are always busy. Times count from when a request was due, so a client that falls behind does not hide it.
Prompts share text exactly as the trace's block ids do.

**Sped-up fleets.** Emulated instances may run ``time_scale`` engine seconds in a second. A replay with the same time
scale sends that much faster, sets a TTFT SLO that much tighter (``x-slo-ttft-ms`` is in milliseconds of the clock) and
reports engine seconds. The router needs the same scale: prefill rates times the scale; SLO, decode stall and hotness
window divided by it (``simulation.emulator.time_scale`` does that for its settings).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.classes import rank_of_name
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.figures.on_time import TPOT_SLO_S
from dualmap.simulation.http_client import HttpClient, HttpClientError, Response
from dualmap.simulation.replay.answer_stream import AnswerStream
from dualmap.simulation.replay.fleet_probe import FleetProbe
from dualmap.simulation.replay.replay_bodies import Endpoint, RequestBodies
from dualmap.simulation.replay.replay_report import UNKNOWN_INSTANCE, ReplayedRequest, ReplayRecord
from dualmap.simulation.workload.arrivals import TRACE_TIMES, Arrivals, Loop
from dualmap.simulation.workload.trace_runs import runs_of
from dualmap.simulation.workload.traces import Trace, TraceRequest


@dataclass(kw_only=True, frozen=True, slots=True)
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
    loop: Loop = TRACE_TIMES
    """The rule by which requests follow each other, in engine seconds."""
    skip_requests: int = 0
    """Requests at the start that warm caches up and stay out of the figures."""
    skip_s: float = 0.0
    """Engine seconds at the start whose requests stay out of the figures, too."""
    timeout_s: float = 3600.0
    """Time for one answer, in engine seconds."""
    salt: str = ""
    """Another salt, other texts: a second replay then finds nothing cached by the first."""
    api_key: str | None = None
    sample_interval_s: float = 1.0
    """Time between looks at the fleet's load, seconds of the clock."""


_AHEAD = 32
"""Bodies kept ready beyond those that follow what is in flight: bursts then cost no more than sending, and a long trace
no memory."""


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
        self._runs = runs_of(trace)
        self._arrivals = Arrivals(trace, options.loop)
        self._unwritten = deque(self._arrivals.known)
        """Places whose bodies are to be written in free moments."""
        self._taken: set[int] = set()
        self._results: list[ReplayedRequest] = []
        self._sent = self._answered = self._on_time = 0
        self._start_s = 0.0
        """The clock when the first request is due."""
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a request is known to be due that was not before."""

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
            rate_per_s=None if options.loop.is_closed(self._trace) else self._trace.rate_per_s,
            time_scale=options.time_scale,
            slo_ttft_s=options.scheduling.slo_ttft_s,
            slo_tpot_s=options.slo_tpot_s,
            skip_requests=options.skip_requests,
            skip_s=options.skip_s,
            concurrency=options.loop.concurrency,
            requests=tuple(sorted(self._results, key=lambda request: request.index)),
            unsent=len(self._trace.requests) - self._sent if stop.is_set() else 0,
            samples=tuple(probe.samples),
            migrations=probe.migrations,
        )

    async def _send_all(self, stop: asyncio.Event) -> None:
        self._start_s = time.monotonic()
        sending: set[asyncio.Task[None]] = set()
        stopping = asyncio.create_task(stop.wait())
        try:
            while not self._arrivals.over:
                is_due = await self._wait(stopping)
                if stop.is_set():
                    break
                if is_due:
                    task = asyncio.create_task(self._take())
                    sending.add(task)
                    task.add_done_callback(sending.discard)
                    await asyncio.sleep(0)  # answers must be read even when all requests are due at once
            answers = asyncio.gather(*sending, return_exceptions=True)
            await asyncio.wait((stopping, answers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            leftover = tuple(sending)
            for task in leftover:
                task.cancel()
            await asyncio.gather(stopping, *leftover, return_exceptions=True)

    async def _wait(self, stopping: asyncio.Task[object]) -> bool:
        """Wait until a request is due, another one's time is known, or the end; returns whether one is due. Writes the
        bodies of the next ones meanwhile."""
        if self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        due_s = self._arrivals.due_s
        while not stopping.done() and not self._changed.done():
            delay_s = None if due_s is None else self._clock_s(due_s) - time.monotonic()
            if delay_s is not None and delay_s <= 0:
                return True
            if self._write_one_ahead():
                await asyncio.sleep(0)
            else:
                await asyncio.wait((stopping, self._changed), timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
        return False

    def _write_one_ahead(self) -> bool:
        """Write one body that is taken later; returns False if there is none, or enough are ready."""
        in_flight = self._sent - len(self._results)
        while self._unwritten and self._unwritten[0] in self._taken:
            self._unwritten.popleft()
        if not self._unwritten or self._bodies.ready >= _AHEAD + in_flight:
            return False
        self._bodies.write_ahead(self._unwritten.popleft())
        return True

    def _take(self) -> Coroutine[Any, Any, None]:
        """Take the request that is due; returns what sends it."""
        due_s = self._clock_s(self._arrivals.due_s or 0.0)
        place = self._arrivals.take()
        self._unwritten.extendleft(self._arrivals.followers(place))
        self._taken.add(place)
        number, self._sent = self._sent, self._sent + 1
        return self._send(number, place, self._bodies.take(place), due_s)

    def _clock_s(self, trace_s: float) -> float:
        """The clock at a time of the trace."""
        return self._start_s + (trace_s - self._arrivals.first_s) / self._options.time_scale

    def _trace_s(self, clock_s: float) -> float:
        return self._arrivals.first_s + (clock_s - self._start_s) * self._options.time_scale

    def _slo_s(self, request: TraceRequest) -> float:
        scheduling = self._options.scheduling
        rank = rank_of_name(scheduling.classes, request.priority)
        return slo_s(scheduling, request.input_tokens, request.slo_ttft_s, rank)

    def _headers(self, request: TraceRequest) -> dict[str, str]:
        slo_ms = self._slo_s(request) * 1000 / self._options.time_scale
        return {"x-slo-ttft-ms": str(max(1, round(slo_ms))), **self._authorization, **self._session(request)}

    def _session(self, request: TraceRequest) -> dict[str, str]:
        """The names of its session and run, as agents with sub-agents send them."""
        if not request.session:
            return {}
        salt, run = self._options.salt, self._runs[request.session]
        names = {"x-session-id": f"{salt}{request.session}"}
        return names if run == request.session else names | {"x-parent-session-id": f"{salt}{run}"}

    async def _send(self, number: int, place: int, body: bytes, due_s: float) -> None:
        """Send one request and record its result in any case."""
        request = self._trace.requests[place]
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
            self._note(number, request, due_s, sent_s, failure, response, stream)
            is_known = self._arrivals.ended(place, self._trace_s(time.monotonic()))
            if (is_known or self._arrivals.over) and not self._changed.done():
                self._changed.set_result(None)

    def _note(
        self,
        number: int,
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
            index=number,
            arrival_s=(due_s - self._start_s) * scale,
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
