"""Message heads as bytes: status lines, header fields, and which fields may cross a proxy."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

import orjson

from dualmap.router.errors import RouterError, error_body, error_headers
from dualmap.router.http.paths import methods_of
from dualmap.router.http.plain_heads import Header, lines, without
from dualmap.router.http.steering import TRANSFER_HEADERS
from dualmap.router.telemetry import trace_context
from dualmap.router.telemetry.trace_context import TraceContext

# RFC 9110 section 7.6.1: fields of one connection only.
HOP_FIELDS: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

# Fields that are not sent in addition to the hop fields: written by the router itself, or meaningless for the instance.
# Answers must come uncompressed, since the data plane reads the first token and the usage from them. The rank is part
# of where a request goes, and so is what sidecars read. The origin is left out because this replica itself decides
# which pages may read its answers.
_NOT_SENT_UP: Final = HOP_FIELDS | {
    b"host",
    b"content-length",
    b"expect",
    b"x-request-id",
    b"x-data-parallel-rank",
    b"x_data_parallel_rank",
    b"accept-encoding",
    b"origin",
    *TRANSFER_HEADERS,
}
_VIA_HTTP_10: Final = b"via: 1.0 dualmap\r\n"
_VIA_HTTP_11: Final = b"via: 1.1 dualmap\r\n"
_USUAL_CONNECTIONS: Final = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close"})
_NO_TOKENS: Final[frozenset[bytes]] = frozenset()
_NOT_SENT_UP_WITHOUT_CREDENTIALS: Final = _NOT_SENT_UP | {b"authorization", b"x-api-key"}
_TRACED: Final = {
    dropped: dropped | {trace_context.FIELD} for dropped in (_NOT_SENT_UP, _NOT_SENT_UP_WITHOUT_CREDENTIALS)
}
"""Fields that are not sent where the router writes the trace context itself."""
FLEET_FIELDS: Final = frozenset(
    {
        b"x-dualmap-instance",
        b"x-dualmap-prefill-instance",
        b"x-dualmap-cached-tokens",
        b"x-dualmap-attempts",
        b"x-dualmap-expected-ttft-ms",
    }
)
"""Fields of an answer about the fleet."""
_NOT_PASSED_DOWN: Final = (
    HOP_FIELDS
    | FLEET_FIELDS
    | {
        b"content-length",
        b"x-request-id",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
    }
)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


_STATUS_LINES: Final = {code: f"HTTP/1.1 {code} {_phrase(code)}\r\n".encode() for code in range(100, 600)}
_END_OF_HEAD: Final = b"\r\n"

_CHUNK: Final = b"%x\r\n%b\r\n"

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# An HTTP/2 client that skipped negotiation: empty SETTINGS, then GOAWAY with HTTP_1_1_REQUIRED (0xd).
HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
HTTP2_GOAWAY: Final = bytes.fromhex("000000040000000000" + "000008070000000000" + "00000000" + "0000000d")


def response_head(status: int, fields: list[Header], body: bytes = b"") -> bytes:
    """A whole response head, the empty line included, and what follows it."""
    return lines(_STATUS_LINES[status], fields, _END_OF_HEAD + body)


def as_chunk(body: bytes) -> bytes:
    """A chunk of a chunked body; nothing for nothing, which would end the body."""
    return _CHUNK % (len(body), body) if body else b""


def connection_tokens(fields: Iterable[Header]) -> frozenset[bytes]:
    """Names that ``Connection`` declares to be of this hop only; almost always empty."""
    tokens: set[bytes] = set()
    for name, value in fields:
        if name == b"connection" and value not in _USUAL_CONNECTIONS:
            tokens.update(token.strip().lower() for token in value.split(b","))
    return frozenset(tokens - {b"close", b"keep-alive", b""}) if tokens else _NO_TOKENS


def fields_for_instance(
    fields: list[Header],
    *,
    keep_credentials: bool,
    keep_transfers: bool = False,
    http_10: bool = False,
    trace: TraceContext | None = None,
    has_connection: bool = True,
    run: str = "",
) -> bytes:
    """The client's fields that go to the instance, as bytes; the same for every try. With ``trace`` the instance
    finds the request's own span as its parent; with ``keep_transfers`` it gets what sidecars read; with
    ``has_connection`` there may be a ``Connection`` among them. ``run`` is the name that the instance gets as vLLM's
    own ``X-Session-ID``, in place of the client's; empty: the client's own is left alone.

    ``Via`` names the protocol by which they came, after earlier proxies (RFC 9110 section 7.6.3).
    """
    dropped = _NOT_SENT_UP if keep_credentials else _NOT_SENT_UP_WITHOUT_CREDENTIALS
    tokens = connection_tokens(fields) if has_connection else _NO_TOKENS
    if tokens:
        dropped = dropped | tokens
    if keep_transfers:
        dropped = (dropped - TRANSFER_HEADERS) | tokens
    via = _VIA_HTTP_10 if http_10 else _VIA_HTTP_11
    if trace is not None:
        dropped = dropped | {trace_context.FIELD} if tokens or keep_transfers else _TRACED[dropped]
        via += b"%b: %b\r\n" % (trace_context.FIELD, trace.to_header())
    if run:
        dropped = dropped | {b"x-session-id"}
        via += b"x-session-id: %b\r\n" % run.encode()
    return lines(b"", without(fields, dropped), via)


def fields_for_client(fields: list[Header], *, has_connection: bool = True) -> list[Header]:
    """The instance's fields that go to the client; framing and fleet fields are added by the caller. With
    ``has_connection`` there may be a ``Connection`` among them."""
    tokens = connection_tokens(fields) if has_connection else _NO_TOKENS
    dropped = _NOT_PASSED_DOWN | tokens if tokens else _NOT_PASSED_DOWN
    return without(fields, dropped)


def error_answer(
    error: RouterError, *, close: bool, path: str = "", bodiless: bool = False, fields: Iterable[Header] = ()
) -> bytes:
    """A complete answer that refuses a request for ``path``; ``bodiless`` for HEAD, which announces the length and
    sends no body."""
    body = orjson.dumps(error_body(error, path))
    head: list[Header] = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *fields,
        *((name.encode(), value.encode("latin-1", "replace")) for name, value in error_headers(error).items()),
    ]
    if error.status == 405:
        head.append((b"allow", methods_of(path).encode()))
    if close:
        head.append((b"connection", b"close"))
    return response_head(error.status, head) + (b"" if bodiless else body)


def options_answer(path: str, *, close: bool, fields: Iterable[Header] = ()) -> bytes:
    """The answer to OPTIONS on an inference path."""
    head: list[Header] = [(b"allow", methods_of(path).encode()), *fields]
    if close:
        head.append((b"connection", b"close"))
    return response_head(204, head)
