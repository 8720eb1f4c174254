"""Edits of the bodies that go to instances: the name of the model, and the fields that the fleet sets in place of what
clients send. A body is edited in a few places, without copying the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import orjson

from dualmap.api_bodies.json_body import read_json
from dualmap.router.prompts.inference_request import InferenceRequest

BodyPart = bytes | memoryview
Edit = tuple[tuple[int, int], bytes]
"""An edit of a body: a span, and the bytes in its place."""

# A quote without a backslash before it begins or ends a string of valid JSON, and only a key is followed by a colon.
_MODEL_KEY: Final = rb'"(?<!\\")' + b"".join(rb"(?:%c|\\u00(?i:%02x))" % (letter, letter) for letter in b"model") + b'"'
_JSON_MODEL: Final = re.compile(_MODEL_KEY + rb'[ \t\r\n]*+:[ \t\r\n]*+("(?:[^"\\]++|\\.)*+")')

BLANK: Final = b" \t\r\n"
_OPENS: Final = ord("{")
USAGE_FIELD: Final = b'"stream_options":{"include_usage":true}'
"""The field of a body, as JSON, that asks for usage."""
IDS_FIELD: Final = b'"return_token_ids":true'
"""The field of a body, as JSON, that asks for the ids of tokens."""


def json_model_span(body: bytes) -> tuple[int, int]:
    """The span of the string that names the model in a JSON object, quotes included. The JSON must be valid, and name
    one."""
    spans = [found.span(1) for found in _JSON_MODEL.finditer(body)]
    return spans[_effective(body, len(spans))]


def edited(body: bytes, edits: Sequence[Edit]) -> list[BodyPart]:
    """The parts of the body with other bytes in the places of the edits, which are in the order of their places."""
    if not edits:
        return [body]
    view, pos = memoryview(body), 0
    parts: list[BodyPart] = []
    for (start, end), replacement in edits:
        parts += [view[pos:start], replacement]
        pos = end
    parts.append(view[pos:])
    return parts


def _effective(body: bytes, count: int) -> int:
    """The index of the object's own field among those of this name (others are nested): the last one, as for any
    reader. The parser shows it: each of them gets its number as a name."""
    if count == 1:
        return 0
    numbers = iter(range(count))

    def numbered(found: re.Match[bytes]) -> bytes:
        return body[found.start() : found.start(1)] + b'"%d"' % next(numbers)

    return int(read_json(_JSON_MODEL.sub(numbered, body))["model"])


def id_field(answer_id: str) -> bytes:
    """The field of a body, as JSON, that asks for an id of the response, of ``router.prompts.inference_request``'s
    form."""
    return b'"request_id":"%b"' % answer_id.encode()


def added_fields(request: InferenceRequest) -> list[bytes]:
    """The fields of a request whose values are the fleet's, as JSON: those that its client must not say, the salt of
    its tenant, the priority of its class."""
    fields = [*request.overrides]
    if request.cache_salt is not None:
        fields.append(salt_field(request.cache_salt))
    if request.engine_priority is not None:
        fields.append(priority_field(request.engine_priority))
    return fields


def form_edits(request: InferenceRequest) -> list[Edit]:
    """The edits of a form that drop what its client must not say, and set the priority of its class."""
    edits = [*request.form_edits]
    if request.engine_priority is not None and request.priority_span is not None:
        edits.append((request.priority_span, b"%d" % request.engine_priority))
    return edits


def field_edit(body: bytes, *fields: bytes) -> Edit:
    """The edit that adds fields at the end of the body, where they stand for those of the same name before, as for any
    reader. The body must be a JSON object."""
    end, added = body.rindex(b"}"), b",".join(fields)
    last = end - 1
    while (byte := body[last]) in BLANK:  # a long body is not copied
        last -= 1
    return (end, end), added if byte == _OPENS else b"," + added


def salt_field(salt: str) -> bytes:
    """vLLM's field that keeps the KV cache of a request apart from all with another salt."""
    return b'"cache_salt":%b' % orjson.dumps(salt)


def priority_field(priority: int) -> bytes:
    """vLLM's field for engines that schedule by priority: lower goes first."""
    return b'"priority":%d' % priority
