"""A small HTTP/1.1 client that hands on a response's body as it arrives.

A load generator shares two cores with the fleet that it measures, so it must cost little: raw transports, bodies sent
in one write, no per-chunk objects beyond the bytes themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from dualmap.runtime.trust import InstanceTrust

IDLE_S = 2.0
"""Idle connections are not reused after this time: servers close theirs after 5 s or more."""


class HttpClientError(Exception):
    """No complete response: the connection could not be made, broke, or was not HTTP."""


@dataclass(slots=True)
class Response:
    """The head of a response; its body went to the caller's function."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""


class HttpClient:
    """Keep-alive connections to one server. Not for untrusted servers: it sets no limits."""

    def __init__(self, url: str, *, connect_timeout_s: float = 10.0, trust: InstanceTrust | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        self.base_path = parts.path.rstrip("/")
        self._host = parts.hostname
        self._trust = (trust or InstanceTrust()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._trust is not None else 80)
        self._authority = parts.netloc.rpartition("@")[2]
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_ClientConnection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        on_body: Callable[[bytes], None] = lambda _data: None,
    ) -> Response:
        """Send one request and wait for the end of its response; cancelling closes the connection.

        Raises:
            HttpClientError: there is no complete response; what has arrived of it has been handed on.
        """
        connection = self._take_idle() or await self._connect()
        fields = {"host": self._authority, "content-length": str(len(body)), **(headers or {})}
        if body:
            fields.setdefault("content-type", "application/json")
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        request = f"{method} {self.base_path}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
        try:
            response = await connection.exchange(request, on_body)
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()
        return response

    async def read(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """GET a small resource: status and body. Raises HttpClientError."""
        pieces: list[bytes] = []
        response = await self.request("GET", path, headers=headers, on_body=pieces.append)
        return response.status, b"".join(pieces)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> _ClientConnection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now_s - connection.idle_since_s < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _ClientConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _transport, connection = await loop.create_connection(
                    _ClientConnection,
                    self._host,
                    self._port,
                    ssl=self._trust.context if self._trust is not None else None,
                )
        except (OSError, TimeoutError) as error:
            raise HttpClientError(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection


class _ClientConnection(asyncio.Protocol):
    """One connection with at most one exchange under way."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[Response] | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._headers: dict[str, str] = {}
        self._until_close = False
        self.reusable = True

    async def exchange(self, request: bytes, on_body: Callable[[bytes], None]) -> Response:
        if self._transport is None:
            raise HttpClientError("the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._headers = {}
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = self._on_body = None

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.reusable = False
        if self._until_close and exc is None:
            self._answer()
        else:
            self._fail(f"the connection was closed before the response was complete{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the response is no HTTP/1.1: {error}")
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._until_close = not framed

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == 100:
            return
        if not self._parser.should_keep_alive():
            self.reusable = False
        self._answer()

    def _answer(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Response(self._parser.get_status_code(), self._headers))

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(HttpClientError(reason))
