"""Finding the model that a body names; and replacing bytes of a body in a few places without copying the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from dualmap.api_bodies.json_body import read_json

BodyPart = bytes | memoryview
Edit = tuple[tuple[int, int], bytes]
"""An edit of a body: a span, and the bytes in its place."""

# A quote without a backslash before it begins or ends a string of valid JSON, and only a key is followed by a colon.
_MODEL_KEY: Final = rb'"(?<!\\")' + b"".join(rb"(?:%c|\\u00(?i:%02x))" % (letter, letter) for letter in b"model") + b'"'
_JSON_MODEL: Final = re.compile(_MODEL_KEY + rb'[ \t\r\n]*+:[ \t\r\n]*+("(?:[^"\\]++|\\.)*+")')


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
