"""One request of a client connection through an ASGI application: all paths but those of inference."""

from __future__ import annotations

import logging
from asyncio import BaseTransport
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol
from urllib.parse import unquote_to_bytes

from dualmap.router.errors import RouterError, from_exception
from dualmap.router.http.downstream import Downstream
from dualmap.router.http.heads import response_head
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.request_reader import ClientRequest

_log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

FROM_GATEWAY: Final = "dualmap.from_gateway"
"""In the scope: whether the request came over a connection of the gateway that names tenants."""
CLIENT_NAME: Final = "dualmap.client_name"
"""In the scope: the name of the verified certificate that the client showed; None without one."""
_FRAMING_FIELDS: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})


class WaitingDownstream(Downstream, Protocol):
    """A downstream whose pressure can be awaited: an app has no byte source to pause."""

    async def drained(self) -> None:
        """Return when the client takes bytes again, or is gone."""

    async def disconnected(self) -> None:
        """Return when the client is gone."""


def build_scope(request: ClientRequest, transport: BaseTransport, state: dict[str, Any]) -> dict[str, Any]:
    """The ASGI scope of a request that came over ``transport``."""
    raw_path = request.path.encode("latin-1")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.0" if request.http_10 else "1.1",
        # The app sees GET for HEAD, and its body is not sent: an app need not know of HEAD.
        "method": "GET" if request.method == "HEAD" else request.method,
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "path": unquote_to_bytes(raw_path).decode("utf-8", "replace"),
        "raw_path": raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": request.fields,
        "client": _address(transport.get_extra_info("peername")),
        "server": _address(transport.get_extra_info("sockname")),
        "state": state,
        FROM_GATEWAY: request.from_gateway,
        CLIENT_NAME: request.client,
    }


def _address(name: object) -> tuple[str, int] | None:
    if isinstance(name, tuple) and len(name) >= 2:
        return str(name[0]), int(name[1])
    return None


async def serve_asgi(
    app: AsgiApp,
    scope: dict[str, Any],
    request: ClientRequest,
    downstream: WaitingDownstream,
    default_fields: list[Header],
) -> None:
    """Run the app for one request and write its answer. Raises only ``CancelledError``."""
    bridge = _AsgiBridge(request, downstream, default_fields)
    try:
        await app(scope, bridge.receive, bridge.send)
        if not bridge.complete:
            raise RuntimeError("the application returned without a whole answer")
    except Exception as error:
        if downstream.gone:
            return
        if not isinstance(error, RouterError):
            _log.error("%s %s failed", request.method, request.path, exc_info=error)
        if not bridge.complete:  # Starlette raises again what it has answered
            downstream.refuse(from_exception(error))


class _AsgiBridge:
    """``receive`` and ``send`` of one request. Its body is whole before the app starts, unless it streams."""

    def __init__(self, request: ClientRequest, downstream: WaitingDownstream, default_fields: list[Header]) -> None:
        self._body: bytes | None = request.body
        self._stream = request.stream
        self._downstream = downstream
        self._default_fields = default_fields
        self._start: Message | None = None
        self._chunked = False
        self._bodiless = False
        self.complete = False

    async def receive(self) -> Message:
        if self._stream is not None:
            piece = await self._stream.read()
            if not piece:
                self._stream = self._body = None
            if piece is None:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": piece, "more_body": bool(piece)}
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.complete:
            await self._downstream.disconnected()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if self._downstream.gone:
            raise OSError("the client has disconnected")
        if kind == "http.response.start" and self._start is None:
            self._start = message
        elif kind == "http.response.body" and self._start is not None and not self.complete:
            self._send_body(message.get("body", b""), last=not message.get("more_body", False))
            await self._downstream.drained()
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _send_body(self, body: bytes, *, last: bool) -> None:
        self.complete = last
        if not self._downstream.committed:
            self._downstream.write_head(self._head(body, last=last) + self._framed(body, last=last))
            return
        self._downstream.write(self._framed(body, last=last))

    def _head(self, body: bytes, *, last: bool) -> bytes:
        assert self._start is not None
        status = self._start["status"]
        fields: list[Header] = [
            (bytes(name).lower(), bytes(value))
            for name, value in self._start.get("headers", ())
            if bytes(name).lower() not in _FRAMING_FIELDS
        ]
        names = {name for name, _ in fields}
        fields += [field for field in self._default_fields if field[0] not in names]
        self._bodiless = self._downstream.bodiless or status in (204, 304)
        if b"content-length" not in names and status not in (204, 304):
            if last:
                fields.append((b"content-length", b"%d" % len(body)))
            elif self._downstream.http_10:
                self._downstream.close_after()
            else:
                self._chunked = True
                fields.append((b"transfer-encoding", b"chunked"))
        if not self._downstream.keeps_alive():
            fields.append((b"connection", b"close"))
        return response_head(status, fields)

    def _framed(self, body: bytes, *, last: bool) -> bytes:
        if self._bodiless:
            return b""
        if not self._chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if last else chunk
