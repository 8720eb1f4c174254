"""Messages of Envoy's external processing: what they say of a request and of its answer, and the replies. Pure.

Replies are bytes: those that never differ are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final

from dualmap.router.errors import (
    HoldTimeoutError,
    QueueFullError,
    ReplicaFullError,
    RouterError,
    ShuttingDownError,
    SloUnreachableError,
    UnavailableError,
)
from dualmap.router.http.heads import Header
from dualmap.router.http.paths import meant_path
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.picker.ext_proc import ProcessingResponse

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Request header, and key of the metadata, with the chosen addresses, the first choice first."""
PREFILLER: Final = "x-prefiller-host-port"
"""Request header by which the sidecar of a decoder finds the instance of the prefill leg."""
REPORTS_FIRST_TOKEN: Final = "x-dualmap-reports-first-token"
"""Request header by which the gateway says that a filter of its own reports the first token of a stream."""
REPORT_TO: Final = "x-dualmap-first-token"
"""Key of the metadata ``envoy.lb`` that tells this filter where."""
ROUTING_HEADERS: Final = (
    DESTINATION,
    PREFILLER,
    REPORTS_FIRST_TOKEN,
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
    "x-data-parallel-rank",
)
"""Request headers that no instance gets from a client: they say where a request goes, or are for the picker."""
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
TEST_SELECTION: Final = b"test-epp-endpoint-selection"
TEST_SERVED: Final = b"x-conformance-test-served-endpoint"

_LB: Final = "envoy.lb"
_SUBSET: Final = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_SERVED: Final = "x-gateway-destination-endpoint-served"
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


def fields_of(headers: Any) -> list[Header]:
    """The header fields of a message, pseudo headers too."""
    return [(each.key.encode("latin-1"), each.raw_value or each.value.encode()) for each in headers.headers.headers]


def client_request(headers: Any) -> ClientRequest:
    """The client's request as the HTTP data plane reads it, without its body."""
    fields: list[Header] = []
    pseudo: dict[bytes, bytes] = {}
    for name, value in fields_of(headers):
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            fields.append((name, value))
    path, _, query = pseudo.get(b":path", b"/").partition(b"?")
    if b":authority" in pseudo:
        fields.append((b"host", pseudo[b":authority"]))
    return ClientRequest(
        method=pseudo.get(b":method", b"GET").decode("latin-1"),
        path=meant_path(path.decode("latin-1")),
        query=query.partition(b"#")[0],
        fields=fields,
        http_10=False,
        keep_alive=True,
    )


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


def status_of(fields: Sequence[Header]) -> int:
    """The status of an answer's head; 0 where it has none."""
    return next((int(value) for name, value in fields if name == b":status" and value.isdigit()), 0)


def served_by(message: Any) -> str:
    """The address that answered, as the gateway says by its metadata, or Envoy by its attributes; "" where neither
    does."""
    metadata = message.metadata_context.filter_metadata
    if _LB in metadata and _SERVED in metadata[_LB].fields:
        return str(metadata[_LB].fields[_SERVED].string_value)
    return _attribute(message, "upstream.address")


def details_of(message: Any) -> str:
    """How Envoy came to the answer: ``via_upstream`` for an instance's own; "" where it does not say."""
    return _attribute(message, "response.code_details")


def _attribute(message: Any, name: str) -> str:
    attributes = message.attributes
    if _ATTRIBUTES not in attributes or name not in attributes[_ATTRIBUTES].fields:
        return ""
    return str(attributes[_ATTRIBUTES].fields[name].string_value)


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


def destination_reply(
    kind: str, addresses: str, fields: Iterable[Header], removed: Iterable[str], body: bytes | None = None
) -> bytes:
    """The choice of a request, in reply to its headers or to its buffered body: as a header and as metadata; with
    further headers, and with another body where one is given."""
    reply = ProcessingResponse()
    response = getattr(reply, kind).response
    response.clear_route_cache = True  # a route may depend on the choice
    mutation = response.header_mutation
    set_fields(mutation, [(DESTINATION.encode(), addresses.encode()), *fields])
    mutation.remove_headers.extend(removed)
    if body is not None:
        response.body_mutation.body = body
    reply.dynamic_metadata.fields[_LB].struct_value.fields[DESTINATION].string_value = addresses
    return bytes(reply.SerializeToString())


def set_fields(mutation: Any, fields: Iterable[Header]) -> None:
    for name, value in fields:
        each = mutation.set_headers.add()
        each.header.key = name.decode("latin-1")
        each.header.raw_value = value
        each.append_action = 2  # OVERWRITE_IF_EXISTS_OR_ADD


def headers_reply(fields: Iterable[Header], *, wants_body: bool = False, report_to: str = "") -> bytes:
    """The head of an answer goes on with these fields; with ``wants_body`` its body is to come here too. ``report_to``:
    where the gateway is to report its first token."""
    reply = ProcessingResponse()
    if report_to:
        reply.dynamic_metadata.fields[_LB].struct_value.fields[REPORT_TO].string_value = report_to
    if wants_body:
        reply.mode_override.response_body_mode = BodyMode.STREAMED
        reply.mode_override.response_trailer_mode = 1  # SEND
    set_fields(reply.response_headers.response.header_mutation, fields)
    return bytes(reply.SerializeToString())


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
    set_fields(answer.headers, fields)
    answer.body = body
    answer.details = details
    return bytes(reply.SerializeToString())


_REASONS: Final[tuple[tuple[type[RouterError], str], ...]] = (
    (ShuttingDownError, "shutting-down"),
    (HoldTimeoutError, "ttl-expired"),
    (UnavailableError, "rejected-no-endpoints"),
    (QueueFullError, "rejected-saturated"),
    (ReplicaFullError, "rejected-saturated"),
    (SloUnreachableError, "rejected-saturated"),
)


def dropped_reason(error: RouterError) -> str | None:
    """llm-d's word for why a request is not served; None where it has none for that."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), None)
