"""Messages of Envoy's external processing: what they say of a request and of its answer, and the replies. Pure.

Replies are bytes: those that never differ are made once, and the two that each request needs are written field by
field, at a quarter of what building and serialising messages costs. The tests read them by the messages' descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.errors import (
    HoldTimeoutError,
    NoInstanceError,
    QueueFullError,
    ReplicaFullError,
    RouterError,
    ShuttingDownError,
    SloUnreachableError,
)
from dualmap.router.http.paths import meant_path, split_target
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.http.steering import TRANSFER_HEADERS
from dualmap.router.picker.ext_proc import ProcessingResponse

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header, and key of the metadata, with the chosen addresses, the first choice first."""
PREFILLER: Final = "x-prefiller-host-port"
"""Request header by which the sidecar of a decoder finds the instance of the prefill leg."""
REPORTS_FIRST_TOKEN: Final = b"x-dualmap-reports-first-token"
"""Request header by which the gateway says that a filter of its own reports the first token of a stream."""
REPORT_TO: Final = "x-dualmap-first-token"
"""Key of the metadata ``envoy.lb`` that tells this filter where."""
OWN_HEADERS: Final = tuple(
    (name, name.encode())
    for name in (DESTINATION, REPORTS_FIRST_TOKEN.decode(), "x-data-parallel-rank", "x_data_parallel_rank")
)
"""Request headers that no instance gets from a client, as text and as bytes: the fleet writes them, or they are for the
picker."""
ROUTING_HEADERS: Final = (
    *OWN_HEADERS,
    *sorted((name.decode(), name) for name in TRANSFER_HEADERS - {DESTINATION.encode()}),
)
"""Those, and the headers that say where KV comes from and goes to, which pass where transfers are trusted."""
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
TEST_SELECTION: Final = b"test-epp-endpoint-selection"
TEST_SERVED: Final = b"x-conformance-test-served-endpoint"

_LB: Final = "envoy.lb"
_ADDRESS: Final = "upstream.address"
_DETAILS: Final = "response.code_details"
_FLAGS: Final = "response.flags"
_UPSTREAM_OVERFLOW: Final = 1 << 7
"""The bit of Envoy's response flag ``UO``."""
_SUBSET: Final = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_SERVED: Final = "x-gateway-destination-endpoint-served"
_READ_OF_ANSWERS: Final = frozenset({b":status", b"content-type", b"content-encoding", b"retry-after"})
_ATTRIBUTES: Final = "envoy.filters.http.ext_proc"

MAX_PIECE_BYTES: Final = 62 << 10
"""Longest piece of a body that is sent back in one message."""


class BodyMode(IntEnum):
    """How Envoy sends a body, as its configuration says."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


# what Envoy says -------------------------------------------------------------------------------------------------
def kind_of(message: Any) -> str:
    """The phase of a message: ``request_headers``, ``response_body`` and so on; "" for an unknown one."""
    return message.WhichOneof("request") or ""


def body_modes(first: Any) -> tuple[BodyMode, BodyMode]:
    """How the bodies of the request and of its answer come, by the first message of a stream. An Envoy that is too old
    to say so is taken for one that waits for no reply before it sends the request's body."""
    if not first.HasField("protocol_config"):
        return BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE
    config = first.protocol_config
    return BodyMode(config.request_body_mode), BodyMode(config.response_body_mode)


def client_request(headers: Any) -> ClientRequest:
    """The client's request as the HTTP data plane reads it, without its body.

    Raises:
        InvalidRequestError: servers read its path differently.
    """
    fields: list[Header] = []
    method, target, authority = "GET", "/", ""
    for each in headers.headers.headers:
        name: str = each.key
        value: bytes = each.raw_value or each.value.encode()
        if name[:1] != ":":
            fields.append((name.encode("latin-1"), value))
        elif name == ":path":
            target = value.decode("latin-1")
        elif name == ":method":
            method = value.decode("latin-1")
        elif name == ":authority":
            authority = value.decode("latin-1")
    if authority:
        fields.append((b"host", authority.encode("latin-1")))
    path, query = split_target(target)
    meant = meant_path(path)
    request = ClientRequest(method, meant, query.encode("latin-1"), fields, http_10=False, keep_alive=True)
    request.was_rewritten = meant != path or "#" in target
    return request


def answer_head(headers: Any) -> AnswerHead:
    """The head of an answer, as far as it is read; a status of 0 where it has none. Of several fields of a name the
    first counts."""
    found: dict[bytes, bytes] = {}
    for each in headers.headers.headers:
        name = each.key.encode()
        if name in _READ_OF_ANSWERS and name not in found:
            found[name] = each.raw_value or each.value.encode()
    status = found.pop(b":status", b"")
    return AnswerHead(int(status) if status.isdigit() else 0, [], Framing.UNTIL_CLOSE, found)


def subset_of(message: Any) -> list[str] | None:
    """The addresses that the gateway allows for a request; None where it allows any."""
    namespace, key = _SUBSET
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata or key not in metadata[namespace].fields:
        return None
    value = metadata[namespace].fields[key]
    if value.WhichOneof("kind") == "list_value":
        texts: Iterable[str] = (each.string_value for each in value.list_value.values)
    else:
        texts = value.string_value.split(",")
    return split_addresses(texts)


def split_addresses(texts: Iterable[str]) -> list[str]:
    """Addresses without the blanks around them, and without empty ones."""
    return [address for address in (text.strip() for text in texts) if address]


@dataclass(frozen=True, slots=True)
class CodeDetails:
    """How Envoy came to an answer: its attribute ``response.code_details``, by its fields
    ``NAME{REASON|words of the transport}``."""

    name: str = ""
    """``via_upstream`` for an instance's own answer; "" where Envoy does not say."""
    reason: str = ""
    """Why the stream to the instance was reset, where it was."""
    text: str = ""

    @classmethod
    def read(cls, text: str) -> CodeDetails:
        name, _, rest = text.partition("{")
        return cls(name, rest.rstrip("}").partition("|")[0], text)


def served_by(message: Any) -> tuple[str, CodeDetails]:
    """The address that answered, as the gateway says by its metadata, or Envoy by its attributes; "" where neither says
    so; and how Envoy came to the answer."""
    served = details = ""
    if _ATTRIBUTES in message.attributes:
        attributes = message.attributes[_ATTRIBUTES].fields
        if _DETAILS in attributes:
            details = attributes[_DETAILS].string_value
        if _ADDRESS in attributes:
            served = attributes[_ADDRESS].string_value
    metadata = message.metadata_context.filter_metadata
    if _LB in metadata and _SERVED in (fields := metadata[_LB].fields):
        served = fields[_SERVED].string_value
    return served, CodeDetails.read(details)


def is_overflow(message: Any, details: CodeDetails) -> bool:
    """Whether a circuit breaker of Envoy kept the request, or a retry of it, from being sent."""
    if details.reason == "overflow":
        return True
    if _ATTRIBUTES not in message.attributes or _FLAGS not in (found := message.attributes[_ATTRIBUTES].fields):
        return False
    return bool(int(found[_FLAGS].number_value) & _UPSTREAM_OVERFLOW)


# what Envoy is told ----------------------------------------------------------------------------------------------
def _plain(kind: str) -> bytes:
    reply = ProcessingResponse()
    part = getattr(reply, kind)
    part.SetInParent()
    if kind.endswith("trailers"):
        part.header_mutation.SetInParent()
    else:
        part.response.SetInParent()
    return bytes(reply.SerializeToString())


GO_ON: Final = {
    kind: _plain(kind)
    for kind in (
        "request_headers",
        "request_body",
        "request_trailers",
        "response_headers",
        "response_body",
        "response_trailers",
    )
}
"""Replies that change nothing, by the phase of the message that they reply to."""
_REPLIES: Final = {each.name: each.number for each in ProcessingResponse.DESCRIPTOR.fields}
"""Numbers of the fields of a reply."""
_STREAM_BODY: Final = ProcessingResponse(
    mode_override={"response_body_mode": BodyMode.STREAMED, "response_trailer_mode": 1}  # SEND
).SerializeToString()
_DESTINATION: Final = DESTINATION.encode()
_REPORT_TO: Final = REPORT_TO.encode()


def destination_reply(
    kind: str, addresses: str, fields: Iterable[Header], removed: Iterable[str], body: bytes | None = None
) -> bytes:
    """The choice of a request, in reply to its headers or to its buffered body: as a header and as metadata; with
    further headers, and with another body where one is given."""
    choice = addresses.encode()
    mutation = _set_fields(((_DESTINATION, choice), *fields))
    for name in removed:
        mutation += _field(2, name.encode())
    response = _field(2, mutation)
    if body is not None:
        response += _field(3, _field(1, body))
    response += b"\x28\x01"  # clear_route_cache: a route may depend on the choice
    return _field(_REPLIES[kind], _field(1, response)) + _lb_metadata(_DESTINATION, choice)


def headers_reply(fields: Iterable[Header], *, wants_body: bool = False, report_to: str = "") -> bytes:
    """The head of an answer goes on with these fields; with ``wants_body`` its body is to come here too. ``report_to``:
    where the gateway is to report its first token."""
    reply = _field(_REPLIES["response_headers"], _field(1, _field(2, _set_fields(fields))))
    if report_to:
        reply += _lb_metadata(_REPORT_TO, report_to.encode())
    return reply + _STREAM_BODY if wants_body else reply


def _set_fields(fields: Iterable[Header]) -> bytes:
    """The part of a ``HeaderMutation`` that sets fields: OVERWRITE_IF_EXISTS_OR_ADD."""
    return b"".join([_field(1, _field(1, _field(1, name) + _field(3, value)) + b"\x18\x02") for name, value in fields])


def _lb_metadata(name: bytes, value: bytes) -> bytes:
    """Dynamic metadata of a reply: ``envoy.lb`` with one text. A map's entry is a message of its key and its value."""
    inner = _field(1, _field(1, name) + _field(2, _field(3, value)))
    return _field(8, _field(1, _LB_KEY + _field(2, _field(5, inner))))


def _field(number: int, payload: bytes) -> bytes:
    """A field of a message whose type has a length: a text, bytes, or another message; up to number 15."""
    size = len(payload)
    if size < 128:
        return bytes((number << 3 | 2, size)) + payload
    length = bytearray((number << 3 | 2,))
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes(length) + payload


def body_replies(kind: str, body: bytes, *, end_of_stream: bool) -> list[bytes]:
    """A body, or a part of one, sent back where Envoy waits for it in pieces."""
    pieces = [body[start : start + MAX_PIECE_BYTES] for start in range(0, len(body), MAX_PIECE_BYTES)] or [b""]
    replies = []
    for number, piece in enumerate(pieces, 1):
        reply = ProcessingResponse()
        streamed = getattr(reply, kind).response.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = end_of_stream and number == len(pieces)
        replies.append(bytes(reply.SerializeToString()))
    return replies


def immediate_reply(status: int, fields: Iterable[Header], body: bytes, details: str) -> bytes:
    """The answer to the client, without an instance."""
    reply = ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = status
    for name, value in fields:
        each = answer.headers.set_headers.add(append_action=2)  # OVERWRITE_IF_EXISTS_OR_ADD
        each.header.key, each.header.raw_value = name.decode("latin-1"), value
    answer.body = body
    answer.details = details
    return bytes(reply.SerializeToString())


_LB_KEY: Final = _field(1, _LB.encode())

_REASONS: Final[tuple[tuple[type[RouterError], str], ...]] = (
    (ShuttingDownError, "shutting-down"),
    (HoldTimeoutError, "ttl-expired"),
    (NoInstanceError, "rejected-no-endpoints"),
    (QueueFullError, "rejected-saturated"),
    (ReplicaFullError, "rejected-saturated"),
    (SloUnreachableError, "rejected-saturated"),
)


def dropped_reason(error: RouterError) -> str | None:
    """llm-d's word for why a request is not served; None where it has none for that."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)
