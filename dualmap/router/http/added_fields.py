"""Fields that the gateway adds to the bodies of requests, in place of what their clients send."""

from __future__ import annotations

from typing import Final

import orjson

from dualmap.router.http.model_field import Edit
from dualmap.router.prompts.inference_request import InferenceRequest

BLANK: Final = b" \t\r\n"
_OPENS: Final = ord("{")
USAGE_FIELD: Final = b'"stream_options":{"include_usage":true}'
"""The field of a body, as JSON, that asks for usage."""
IDS_FIELD: Final = b'"return_token_ids":true'
"""The field of a body, as JSON, that asks for the ids of tokens."""


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
