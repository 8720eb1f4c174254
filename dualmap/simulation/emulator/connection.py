"""A small HTTP/1.1 server connection: keep-alive, pipelining, chunked answers, and notice of clients that leave.

Written at protocol level because four emulated servers, a router fleet and a load generator share two cores: a
streamed chunk costs one formatting and one write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

import httptools

KEEP_ALIVE_S = 5.0
"""Idle connections are closed after this time, as vLLM's server does."""
MAX_PIPELINED = 16
MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    """Path without the query."""
    headers: dict[str, str]
    """Names in lower case; the last of a repeated one."""
    body: bytes
    keep_alive: bool = True
    query: str = ""
    """The query behind the path, without the question mark."""


class Responder:
    """The writer of one answer. Writing after the client has left does nothing."""

    def __init__(self, connection: HttpConnection, keep_alive: bool, *, bodiless: bool = False) -> None:
        """``bodiless``: it answers HEAD, whose answer ends with its head."""
        self.on_disconnect: Callable[[], None] | None = None
        """Callback for a client that leaves before the answer is complete; it is called once."""
        self.gone = False
        self._connection = connection
        self._keep_alive = keep_alive
        self._bodiless = bodiless

    @property
    def writable(self) -> bool:
        """False while the client reads slower than it is written to."""
        return self._connection.writable

    def send(self, status: int, body: bytes, content_type: str = "application/json", *, fields: str = "") -> None:
        """A whole answer; ``fields`` are further lines of its head."""
        head = self._head(status, content_type, f"{fields}content-length: {len(body)}")
        self._write(head if self._bodiless else head + body)
        self._complete()

    def send_half(self, status: int, body: bytes, content_type: str) -> None:
        """The first half of an answer, and no more."""
        self._write(self._head(status, content_type, f"content-length: {len(body)}") + body[: len(body) // 2])
        self.cut()

    def start_stream(self) -> None:
        """The head of a stream of server-sent events."""
        self._write(self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked"))

    def write(self, data: bytes) -> None:
        """A piece of the stream; must not be empty."""
        if not self._bodiless:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self, data: bytes) -> None:
        """The last piece; may be empty."""
        last = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        if not self._bodiless:
            self._write(last + b"0\r\n\r\n")
        self._complete()

    def cut(self) -> None:
        """Close the connection in the middle of a stream."""
        self.on_disconnect = None
        self.gone = True
        self._connection.close()

    def _head(self, status: int, content_type: str, framing: str) -> bytes:
        connection = "" if self._keep_alive else "connection: close\r\n"
        phrase = HTTPStatus(status).phrase
        return (
            f"HTTP/1.1 {status} {phrase}\r\nserver: dualmap-emulator\r\n"
            f"content-type: {content_type}\r\n{connection}{framing}\r\n\r\n"
        ).encode("latin-1")

    def _write(self, data: bytes) -> None:
        if not self.gone:
            self._connection.write(data)

    def _complete(self) -> None:
        self.on_disconnect = None
        if not self.gone:
            self._connection.answered(self._keep_alive)


Handler = Callable[[HttpRequest, Responder], None]
"""Answers a request at once or later through the responder; must not raise."""


class Connections:
    """The open connections of one server."""

    def __init__(self) -> None:
        self._open: set[HttpConnection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, connection: HttpConnection) -> None:
        self._open.add(connection)
        self._empty.clear()

    def discard(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._empty.set()

    def abort(self) -> None:
        """Close all at once, as a killed process does."""
        for connection in tuple(self._open):
            connection.abort()

    async def close(self, timeout_s: float) -> None:
        """Close all, giving their clients some time to read what has been written."""
        for connection in tuple(self._open):
            connection.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            self.abort()


class HttpConnection(asyncio.Protocol):
    """Parses requests and hands them over one at a time, in order."""

    def __init__(self, handler: Handler, connections: Connections) -> None:
        self.writable = True
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._active: Responder | None = None
        self._queued: deque[HttpRequest] = deque()
        self._reset()

    # the transport's side -----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its class
        self._connections.add(self)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        self._queued.clear()
        self._stop_idle_timer()
        responder, self._active = self._active, None
        if responder is not None:
            responder.gone = True
            if responder.on_disconnect is not None:
                responder.on_disconnect()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(400, b"Invalid HTTP request received.")

    # the parser's side --------------------------------------------------------------------------------------
    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, b"Request header fields too large.")
        else:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and self._active is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse(413, b"Request body too large.")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
            query=self._url.partition(b"?")[2].decode("latin-1"),
        )
        self._reset()
        if self._transport is None or self._transport.is_closing():
            return
        if self._active is None:
            self._hand_over(request)
        elif len(self._queued) < MAX_PIPELINED:
            self._queued.append(request)
        else:
            self.close()

    # the responder's side -----------------------------------------------------------------------------------
    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def answered(self, keep_alive: bool) -> None:
        """The active request has its whole answer."""
        self._active = None
        if not keep_alive:
            self.close()
        elif self._queued:
            asyncio.get_running_loop().call_soon(self._hand_over_next)
        else:
            self._await_request()

    def close(self) -> None:
        """Close after what is written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once and drop what has not been sent; nothing can be written any more."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # ----------------------------------------------------------------------------------------------------------
    def _hand_over(self, request: HttpRequest) -> None:
        self._active = Responder(self, request.keep_alive, bodiless=request.method == "HEAD")
        self._handler(request, self._active)

    def _hand_over_next(self) -> None:
        if self._active is None and self._queued:
            self._hand_over(self._queued.popleft())

    def _refuse(self, status: int, reason: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if self._active is None:
                bodiless = self._parser.get_method() == b"HEAD"
                Responder(self, keep_alive=False, bodiless=bodiless).send(status, reason, "text/plain")
            else:
                self.close()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    def _await_request(self) -> None:
        self._stop_idle_timer()
        self._idle_timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self.close)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
