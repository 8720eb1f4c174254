"""A client connection: requests read, answered one after the other, closed when its time is up."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.server import ServerState

from dualmap.router.answers.sse import COMMENT
from dualmap.router.errors import ReplicaFullError, RequestTimeoutError, RouterError
from dualmap.router.http.admission import wait_for_caller
from dualmap.router.http.asgi_bridge import AsgiApp, build_scope, serve_asgi
from dualmap.router.http.client_certificates import HeadCheckFinder
from dualmap.router.http.connection_limit import ConnectionLimit
from dualmap.router.http.downstream import ByteSource
from dualmap.router.http.forward import serve_inference
from dualmap.router.http.half_closed import DepartureProbes
from dualmap.router.http.heads import (
    CONTINUE,
    HTTP2_GOAWAY,
    HTTP2_PREFACE,
    as_chunk,
    error_answer,
    options_answer,
)
from dualmap.router.http.paths import INFERENCE_PATHS, is_inference
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import MAX_PIPELINED_REQUESTS, ClientRequest, RequestReader
from dualmap.scheduling.request.outcome import Outcome

if TYPE_CHECKING:
    from dualmap.router.http.answer_driver import AnswerDriver

_log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 256 << 10
"""Bytes of an answer that a client has not read before its instance is paused."""
LINGER_S: Final = 2.0
"""Time for which the rest of an unfinished request is read and dropped after its answer: closing at once would make the
client's kernel throw the answer away (RFC 9112 section 9.6)."""


class Stage(Enum):
    """How far a connection is; none goes back to an earlier one."""

    SERVING = "serving"
    """It answers one request after the other."""
    LAST = "last"
    """The present answer, or the next one, is its last."""
    LINGERING = "lingering"
    """It answers no more, and reads and drops the rest of an unfinished request."""
    ENDED = "ended"
    """It answers no more. What was written may still be on its way."""


_SERVING: Final = Stage.SERVING
_LAST: Final = Stage.LAST
_OVER: Final = (Stage.LINGERING, Stage.ENDED)
"""The stages in which no request is answered any more."""


class ClientConnection(asyncio.Protocol):
    """One connection. It is the ``Downstream`` of the answer it carries; there is one at a time.

    Reading never stops, so a client that left is detected at once; what it sends ahead is bounded instead: one request
    being read (within its limits) and a few complete ones.
    """

    def __init__(
        self, plane: DataPlane, check_of: HeadCheckFinder, app: AsgiApp, server_state: ServerState,
        app_state: dict[str, Any], limit_of: Callable[[asyncio.BaseTransport], ConnectionLimit],
    ) -> None:  # fmt: skip
        self._plane = plane
        self._app = app
        self._server_state = server_state
        self._connections = cast("set[asyncio.Protocol]", server_state.connections)  # uvicorn names its own only
        self._app_state = app_state
        self._limit_of = limit_of
        self._limit: ConnectionLimit = None  # type: ignore[assignment]  # until connection_made
        self._loop = asyncio.get_running_loop()
        self._check_of = check_of
        self._reader: RequestReader = None  # type: ignore[assignment]  # until connection_made
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        self._waiting: deque[ClientRequest] = deque()
        self._serving: asyncio.Task[None] | None = None
        """One for all answers, from the first request on."""
        self._arrival: asyncio.Future[None] | None = None
        """The future that the serving task awaits between two requests."""
        self._request: ClientRequest | None = None
        """The one being answered."""
        self._stage = _SERVING
        self._source: ByteSource | None = None
        self._writable = True
        self._waiters: list[asyncio.Future[None]] = []
        self._since_s = self._loop.time()
        """Start of the present wait: for a request, for its rest, for the client to read, for the linger."""
        self._probes: DepartureProbes | None = None
        self._cut: RouterError | None = None
        self._lent_to: AnswerDriver | None = None
        self.file = -1
        # Attributes of the present answer (see Downstream):
        self.path = ""
        self.page_fields: Sequence[Header] = ()
        self.received_s = self._since_s
        self.http_10 = False
        self.bodiless = False
        self.committed = False
        self.between_events = False
        self.gone = False

    # uvicorn and the transport ---------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's: nothing to assert.
        self._transport = tcp = cast("asyncio.Transport", transport)
        tcp.set_write_buffer_limits(BUFFER_BYTES)
        plain = transport.get_extra_info("sslcontext") is None
        if plain and (connected := transport.get_extra_info("socket")) is not None:
            self.file = connected.fileno()
        self._reader = RequestReader(self._check_of(transport), bodies=self._plane.bodies, hold=self._hold_reading)
        self._connections.add(self)
        self._plane.metrics.connections_changed(1)
        self._plane.deadlines.add(self)
        self._limit = limit = self._limit_of(transport)
        limit.connections += 1
        if limit.connections > limit.max_connections:
            self._refuse_input(ReplicaFullError(limit.when_full, retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._stage = Stage.ENDED
        if self._lent_to is not None:
            self._lent_to.take_back()
        self.file = -1
        self._connections.discard(self)
        self._limit.connections -= 1
        self._plane.metrics.connections_changed(-1)
        self._plane.deadlines.discard(self)
        for request in self._waiting:
            request.drop_body()
        self._waiting.clear()
        self._reader.drop_body()
        if self._probes is not None:
            self._probes.stop()
        self._release_waiters()
        if self._serving is not None and (self._request is None or is_inference(self._request.path)):
            self._serving.cancel()  # frees the instance; an app hears of it by receive() and send()

    def eof_received(self) -> bool:
        """The client has closed its sending half, or left: probes show which. Its complete requests are answered.

        Returning False closes the transport, behind what is still to be written.
        """
        if self._stage in _OVER or self._request is None:
            return False
        if self.http_10 or self._transport.get_extra_info("sslcontext") is not None:
            self._transport.abort()  # HTTP/1.0 has no probe, and TLS no half-closed state: the client counts as gone
            return False
        self._reader.end()
        self._probes = DepartureProbes(self._loop, self._probe)
        return True

    def _probe(self) -> None:
        if not self.committed:
            self._transport.write(CONTINUE)
        elif self._source is not None:
            self._source.probe()
        elif self.between_events:
            self._transport.write(COMMENT if self.http_10 else as_chunk(COMMENT))

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if self._stage in _OVER or reader.stopped:
            return
        if not reader.reading and data.startswith(HTTP2_PREFACE):
            self._transport.write(HTTP2_GOAWAY)
            self._close()
            return
        was_reading = reader.reading
        requests = reader.feed(data)
        if reader.reading and (requests or not was_reading or reader.stage_begins()):
            self._since_s = self._loop.time()
        self._waiting += requests
        if len(self._waiting) > 1 and self._sent_too_far_ahead():
            reader.stopped = True
        self._next()

    def _hold_reading(self, held: bool) -> None:
        """Read nothing while the answer is behind with a body that it reads while it comes."""
        if self._transport.is_closing():
            return
        if held:
            self._transport.pause_reading()
        else:
            self._since_s = self._loop.time()
            self._transport.resume_reading()

    def _sent_too_far_ahead(self) -> bool:
        waiting = self._waiting
        if len(waiting) > MAX_PIPELINED_REQUESTS:
            return True
        return sum(len(request.body) for request in waiting) > self._plane.settings.max_body_bytes

    def pause_writing(self) -> None:
        self._writable = False
        self._since_s = self._loop.time()
        if self._source is not None:
            self._source.pause_reading()

    def resume_writing(self) -> None:
        self._writable = True
        if self._source is not None:
            self._source.resume_reading()
        self._release_waiters()

    def shutdown(self) -> None:
        """uvicorn shuts down: close when idle, else behind the answer."""
        self.close_after()
        if self._request is None and not self._waiting and not self._reader.reading:
            self._close()

    def cut_off(self, error: RouterError) -> bool:
        """The time to finish is over: end the present request with an error. False if there is none.

        One of which nothing was sent gets the error as its answer, a stream an error event; both then close.
        """
        self.close_after()
        self._cut = error
        if self._request is None or self._serving is None:
            reading = self._reader.reading and self._stage not in _OVER
            if reading:
                self._refuse_input(error)
            return reading
        if self.committed and self._source is not None:
            self._source.give_up(error)
        else:
            self._serving.cancel(Outcome.CUT_OFF)
        return True

    # one answer after the other ------------------------------------------------------------------------------
    def _next(self) -> None:
        """Start on the next request, if none is being answered."""
        if self._request is not None or self._stage in _OVER:
            return
        if not self._waiting:
            self._after_last()
            return
        request, cors = self._waiting.popleft(), self._plane.cors
        self._request = request
        self.path = request.path
        self.page_fields = () if cors is None else cors.fields(request)
        self.received_s = self._loop.time()
        self.http_10 = request.http_10
        self.bodiless = request.method == "HEAD"
        self.committed = False
        if not request.keep_alive:
            self.close_after()
        if request.stream is not None and self._reader.expects_continue:
            self._reader.expects_continue = False
            self._transport.write(CONTINUE)
        if self._serving is None:
            self._serving = self._loop.create_task(self._serve())
            self._serving.add_done_callback(self._ended)
        elif self._arrival is not None:
            self._arrival.set_result(None)
            self._arrival = None
        self._server_state.tasks.add(self._serving)

    async def _serve(self) -> None:
        """Answer the present request, and those that follow it on this connection."""
        while (request := self._request) is not None:
            if request.caller_known is not None:
                await self._wait_for_caller(request)
            if request.path in INFERENCE_PATHS and request.method == "POST" and request.refusal is None:
                await serve_inference(request, self, self._plane)
            else:
                await self._answer(request)
            self._answered(request)
            del request  # an idle connection keeps nothing of it
            self._go_on()
            if self._request is None and self._stage not in _OVER:
                self._arrival = self._loop.create_future()
                await self._arrival

    async def _wait_for_caller(self, request: ClientRequest) -> None:
        try:
            await wait_for_caller(request, self._plane.tenants)
        except RouterError as refusal:
            request.refusal = refusal

    def _after_last(self) -> None:
        """No request to answer: send what the request being read is waiting for, or wait."""
        reader = self._reader
        if reader.refusal is not None:
            self._refuse_input(reader.refusal)
        elif reader.stopped:
            self._close()
        elif reader.expects_continue:
            reader.expects_continue = False
            self._transport.write(CONTINUE)

    async def _answer(self, request: ClientRequest) -> None:
        if request.refusal is not None:
            self.refuse(request.refusal)
        elif request.method == "OPTIONS" and (is_inference(request.path) or self.page_fields):
            self.write_head(options_answer(request.path, close=not self.keeps_alive(), fields=self._own_fields()))
        elif not is_inference(request.path):
            scope = build_scope(request, self._transport, self._app_state.copy())
            await serve_asgi(self._app, scope, request, self, self._own_fields())
        else:
            await serve_inference(request, self, self._plane)

    def _answered(self, request: ClientRequest) -> None:
        self._server_state.tasks.discard(cast("asyncio.Task[None]", self._serving))
        self._server_state.total_requests += 1
        self._source = self._request = None
        self.between_events = False
        if request.body:
            request.drop_body()
        if request.stream is not None:
            request.stream.break_off()

    def _ended(self, serving: asyncio.Task[None]) -> None:
        """The last answer was cancelled or failed, or there is none to come."""
        if (request := self._request) is None:
            return
        self._answered(request)
        if serving.cancelled() and self._cut is not None:
            self.refuse(self._cut)
        else:
            if not serving.cancelled():
                _log.error("an answer failed", exc_info=serving.exception())
            self._transport.abort()
        self._go_on()

    def _go_on(self) -> None:
        if self._transport.is_closing():
            return
        self._since_s = self._loop.time()
        if self._stage is _SERVING:
            self._next()
        elif self._reader.reading:
            self._linger()
        else:
            self._close()

    def _refuse_input(self, error: RouterError) -> None:
        """Answer what could not be read as a request, and close."""
        self.committed = False
        self.bodiless = False
        self.path, self.page_fields = self._reader.path, ()
        self.close_after()
        self.refuse(error)
        self._linger()

    def _linger(self) -> None:
        self._stage = Stage.LINGERING
        self._since_s = self._loop.time()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _close(self) -> None:
        if self._stage not in _OVER:
            self._since_s = self._loop.time()
            self._stage = Stage.ENDED
        self._transport.close()

    # Downstream ----------------------------------------------------------------------------------------------
    def keeps_alive(self) -> bool:
        stopped = self._reader.stopped and not self._waiting
        if self.http_10 or stopped or self._plane.draining() or self._answers_early():
            self.close_after()
        return self._stage is _SERVING

    def _answers_early(self) -> bool:
        """Whether an answer now comes before the body of its request: the rest is not read."""
        stream = None if self._request is None else self._request.stream
        return stream is not None and not stream.ended

    def write(self, data: bytes) -> None:
        if self._lent_to is not None:
            self._lent_to.take_back()
        if not self.gone:  # bytes that the instance sends before it sees the disconnect
            self._transport.write(data)

    def write_head(self, head: bytes) -> None:
        self.committed = True
        self.write(head)

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        if self.gone:
            return
        if self.committed:
            self.abort()
            return
        self._plane.metrics.refused(error.status, error.code)
        fields = [*self._own_fields(), *fields]
        close = not self.keeps_alive()
        self.write_head(error_answer(error, close=close, path=self.path, bodiless=self.bodiless, fields=fields))

    def _own_fields(self) -> list[Header]:
        return [*self._server_state.default_headers, *self.page_fields]  # uvicorn's: the date, made once per second

    def set_source(self, source: ByteSource | None) -> None:
        self._source = source
        if source is not None and not self._writable:
            source.pause_reading()

    def close_after(self) -> None:
        if self._stage is _SERVING:
            self._stage = _LAST

    def abort(self) -> None:
        self._stage = Stage.ENDED
        self._transport.abort()

    def break_off(self, last_words: bytes) -> None:
        if last_words:
            self.write(last_words)
            self._close()
        else:
            self.abort()

    def may_lend(self) -> bool:
        return self._writable and self._stage not in _OVER and self._transport.get_write_buffer_size() == 0

    def lend(self, to: AnswerDriver) -> None:
        self._lent_to = to

    def end_loan(self) -> None:
        self._lent_to = None

    async def drained(self) -> None:
        while not self._writable and not self.gone:
            await self._wait()

    async def disconnected(self) -> None:
        while not self.gone:
            await self._wait()

    async def _wait(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _release_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # deadlines -----------------------------------------------------------------------------------------------
    def check_deadlines(self, now_s: float) -> None:
        """Compare the waits for the client with their limits."""
        settings = self._plane.settings
        waited_s = now_s - self._since_s
        if self._stage is Stage.LINGERING:
            if waited_s > LINGER_S:
                self._transport.abort()
        elif self._stage is Stage.ENDED or not self._writable:  # an unread last answer keeps its connection open, too
            if waited_s > settings.chunk_timeout_s:
                self.abort()
        elif self._request is not None:
            stream = self._request.stream
            if stream is not None and stream.awaited and waited_s > settings.client_timeout_s:
                stream.break_off(RequestTimeoutError(_too_slow(settings.client_timeout_s)))
        elif self._reader.reading:
            if waited_s > settings.client_timeout_s:
                self._refuse_input(RequestTimeoutError(_too_slow(settings.client_timeout_s)))
        elif waited_s > settings.keep_alive_s:
            self._close()


def _too_slow(time_s: float) -> str:
    return f"the request did not come within {time_s:g} s; send it faster, or raise router.client_timeout_s"
