"""Streams of a gateway as a test writes them, and pickers that read them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from dualmap.router.http import build_data_plane
from dualmap.router.picker.addresses import Addresses
from dualmap.router.picker.ext_proc import ProcessingRequest, ProcessingResponse
from dualmap.router.picker.messages import BodyMode
from dualmap.router.picker.picked import PickedRequest, Picker, make_head_check
from dualmap.router.replica.runtime import Runtime

NO_MODE = BodyMode.NONE
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
COMPLETIONS = "/v1/completions"
STREAM = {"content-type": "text/event-stream"}


def head(
    path: str = COMPLETIONS,
    *,
    method: str = "POST",
    ends: bool = False,
    modes: tuple[BodyMode, BodyMode] | None = (DUPLEX, NO_MODE),
    subset: list[str] | str | None = None,
    **fields: str,
) -> Any:
    """The first message of a stream; underscores in the names of fields are hyphens."""
    message = ProcessingRequest()
    named = {":method": method, ":path": path, ":authority": "gateway", "x-request-id": "r-1"}
    add_fields(message.request_headers.headers, {**named, **{name.replace("_", "-"): fields[name] for name in fields}})
    message.request_headers.end_of_stream = ends
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    if subset is not None:
        value = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[
            "x-gateway-destination-endpoint-subset"
        ]
        if isinstance(subset, str):
            value.string_value = subset
        else:
            value.list_value.extend(subset)
    return message


def add_fields(headers: Any, fields: Mapping[str, str]) -> None:
    for name, value in fields.items():
        headers.headers.add(key=name, raw_value=value.encode())


def body(content: bytes | dict[str, Any], *, ends: bool = True) -> Any:
    message = ProcessingRequest()
    message.request_body.body = content if isinstance(content, bytes) else orjson.dumps(content)
    message.request_body.end_of_stream = ends
    return message


def prompt(text: str = "hello", **fields: Any) -> Any:
    return body({"model": "default", "prompt": text, **fields})


def answer_head(
    status: int = 200,
    fields: Mapping[str, str] | None = None,
    *,
    served: str = "",
    by_metadata: str = "",
    details: str = "via_upstream",
    flags: int = 0,
    ends: bool = False,
) -> Any:
    message = ProcessingRequest()
    add_fields(message.response_headers.headers, {":status": str(status), **(fields or {})})
    message.response_headers.end_of_stream = ends
    attributes = message.attributes["envoy.filters.http.ext_proc"]
    attributes.fields["response.code_details"].string_value = details
    attributes.fields["response.flags"].number_value = flags
    if served:
        attributes.fields["upstream.address"].string_value = served
    if by_metadata:
        key = "x-gateway-destination-endpoint-served"
        message.metadata_context.filter_metadata["envoy.lb"].fields[key].string_value = by_metadata
    return message


def answer_body(content: bytes, *, ends: bool = False) -> Any:
    message = ProcessingRequest()
    message.response_body.body = content
    message.response_body.end_of_stream = ends
    return message


def trailers(kind: str) -> Any:
    message = ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


class Stream:
    """A stream whose messages a test sends; ``end`` ends it."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: list[Any] = []

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._messages.put_nowait(message)

    def end(self) -> None:
        self._messages.put_nowait(None)

    async def read(self) -> Any | None:
        return await self._messages.get()

    async def write(self, reply: bytes) -> None:
        self.replies.append(ProcessingResponse.FromString(reply))

    @property
    def kinds(self) -> list[str]:
        """The phases of the replies so far."""
        return [reply.WhichOneof("response") for reply in self.replies]

    @property
    def choice(self) -> Any:
        """The reply that has the choice."""
        (found,) = [reply for reply in self.replies if "envoy.lb" in reply.dynamic_metadata.fields]
        return found

    @property
    def addresses(self) -> list[str]:
        fields = self.choice.dynamic_metadata.fields["envoy.lb"].struct_value.fields
        text: str = fields["x-gateway-destination-endpoint"].string_value
        return text.split(",")

    def set_fields(self, reply: Any) -> dict[str, str]:
        """The headers that a reply sets."""
        kind = reply.WhichOneof("response")
        part = getattr(reply, kind)
        mutation = part.headers if kind == "immediate_response" else part.response.header_mutation
        return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


class Gateway:
    """A picker, and the streams that it serves."""

    def __init__(self, runtime: Runtime, **options: Any) -> None:
        self.runtime = runtime
        self.plane = build_data_plane(runtime.context.settings, runtime.intake, tenants=runtime.tenants)
        settings = runtime.context.settings
        check = make_head_check(
            self.plane.tenants, max_body_bytes=settings.max_body_bytes, forbidden_paths=settings.forbidden_paths
        )

        async def cards() -> dict[str, Any]:
            return runtime.pools.model_cards(0, {})

        self.picker = Picker(self.plane, check, Addresses(runtime.context.clock), cards, **options)

    def open(self, *messages: Any, peer: str = "") -> tuple[Stream, asyncio.Task[None]]:
        """A stream from ``peer``, as gRPC writes an address."""
        stream = Stream()
        stream.send(*messages)
        return stream, asyncio.create_task(PickedRequest(stream, self.picker, peer).run())

    @property
    def outcomes(self) -> dict[str, int]:
        """How requests ended, in all pools."""
        found: dict[str, int] = {}
        for pool in self.runtime.pools.pools.values():
            for outcome, counter in pool.metrics.outcomes.items():
                if count := int(counter.value):
                    found[outcome.value] = found.get(outcome.value, 0) + count
        return found

    def leaves_nothing(self) -> bool:
        return len(self.runtime.context.live) == 0 and self.plane.bodies.held_bytes == 0
