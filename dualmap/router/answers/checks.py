"""Checks whether what came under a status of success is an answer, as far as that shows without parsing it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, Final

import orjson

from dualmap.router.answers.fields import is_aborted
from dualmap.router.answers.sse import EVENT_END, error_status, event_object, is_error, json_object
from dualmap.router.prompts.inference_request import COMPLETIONS_PATHS, MESSAGES_PATH, RESPONSES_PATH, SCHEDULED_PATHS
from dualmap.scheduling.request.answers import Verdict
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure

OBJECT_PATHS: Final = SCHEDULED_PATHS | {
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/detokenize",
    "/inference/v1/generate",
    "/tokenize",
}
"""Paths whose answers are JSON or event streams, or bytes of a type that says so."""

TAIL_BYTES: Final = 4096
"""At least this many of its last bytes are searched for the end of an answer, however small the reads were."""

_BLANKS: Final = b" \t\r\n"
JSON_STARTS: Final = (b"{", b"[")
_BOM: Final = b"\xef\xbb\xbf"
_TEXT_TYPES: Final = (b"text/", b"application/json", b"application/xhtml", b"application/xml")
"""An answer of these types, or of none, that does not begin as JSON is a page or a message of something else than an
engine."""
_STREAM_TYPE: Final = b"text/event-stream"
_ERROR_START: Final = re.compile(rb'\{\s*"(?:error"\s*:\s*(?:\{\s*"|"(?!"))|object"\s*:\s*"error")')
_EVENTS_START: Final = re.compile(rb"(?:data|event|id|retry)?:")
_SHOWN_BYTES: Final = 200

_LINE: Final = rb"(?:\A|(?<=[\r\n]))"
_DONE: Final = re.compile(_LINE + rb"data:\s*\[DONE\]")
_DONE_ENDS: Final = tuple(end + done for end in (b"\n", b"\r") for done in (b"data: [DONE]", b"data:[DONE]"))
_DONE_BYTES: Final = 32
"""``_DONE_ENDS`` and the blanks behind it are not longer, as engines write them."""


def _named_event(values: bytes) -> re.Pattern[bytes]:
    return re.compile(_LINE + rb"event:\s*(?:" + values + rb")[\r\n]")


_MESSAGE_ENDS: Final = frozenset({"message_stop", "error"})
_RESPONSE_ENDS: Final = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"}
)
_NAMED_ENDS: Final = {
    MESSAGES_PATH: _named_event(rb"message_stop|error"),
    RESPONSES_PATH: _named_event(rb"response\.(?:completed|incomplete|failed|cancelled)|error"),
}
"""The line that names the last event of a whole stream, by path. No text of an event can have a line of its own."""


def _ends_choice(event: Mapping[str, Any]) -> bool:
    choices = event.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and isinstance(choice.get("finish_reason"), str) for choice in choices
    )


_IS_LAST: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    **dict.fromkeys(COMPLETIONS_PATHS, lambda event: _ends_choice(event) or is_error(event)),
    MESSAGES_PATH: lambda event: event.get("type") in _MESSAGE_ENDS,
    RESPONSES_PATH: lambda event: event.get("type") in _RESPONSE_ENDS,
}
"""Whether an event is one near the end of a whole stream, by path, if the stream has no ``[DONE]``."""


@lru_cache(maxsize=64)
def body_type(content_type: bytes | None, content_encoding: bytes | None) -> tuple[bool, bool]:
    """Whether a body of this type can be read here, and could be something else than an answer; and whether it is read
    as an event stream, as its type says."""
    if content_encoding and content_encoding.strip().lower() not in (b"", b"identity"):
        return False, False
    said = (content_type or b"").lower()
    return not said or said.startswith(_TEXT_TYPES), said.startswith(_STREAM_TYPE)


def starts_events(body: bytes) -> bool:
    """Whether it begins as an event stream, whatever its type says."""
    return body[:1] not in JSON_STARTS and _EVENTS_START.match(_text(body)) is not None


def _text(body: bytes) -> bytes:
    return body.removeprefix(_BOM).lstrip(_BLANKS)


def failure_of_object(body: bytes, *, readable: bool = True) -> InstanceFailure | None:
    """The failure that an answer of success shows, of whose body this is the start, or the whole of it. It is
    ``readable`` where its ``body_type`` says so."""
    start = body if body[:1] in JSON_STARTS else _text(body)
    if not start:
        return InstanceFailure(FailureKind.NO_ANSWER, "an empty answer")
    if not readable:
        return None
    if start[:1] not in JSON_STARTS:
        if starts_events(start):
            return None
        return InstanceFailure(FailureKind.NO_ANSWER, f"an answer that is not JSON: {_shown(start)}")
    if _ERROR_START.match(start) is not None:
        failure = InstanceFailure(FailureKind.STATUS, _shown(start), _status_of(start))
        return None if failure.verdict is Verdict.BLAMELESS else failure
    may_be_aborted = b'"abort"' in body or b'"cancelled"' in body or _MESSAGE.search(body) is not None
    return ABORTED if may_be_aborted and is_aborted(json_object(start) or {}) else None


_MESSAGE: Final = re.compile(rb'"type"\s*:\s*"message"')
"""A whole message has this, and so has one that was aborted: whether it was, its fields tell."""
ABORTED: Final = InstanceFailure(FailureKind.ABORTED, "the instance aborted the answer (finish_reason: abort)")
TRUNCATED: Final = InstanceFailure(FailureKind.TRUNCATED, "the stream ended before the answer did")


def ends_whole(path: str, pieces: Sequence[bytes]) -> bool:
    """Whether the last ``pieces`` of a stream end its answer. True where that cannot be known: on other paths, and
    where the last event is longer than what is left of it."""
    if path not in _IS_LAST:
        return True
    tail = b"".join(pieces)
    if tail[-_DONE_BYTES:].rstrip(_BLANKS).endswith(_DONE_ENDS):  # nearly all streams: nothing more is searched
        return True
    if _has_last_event(path, tail) or _DONE.search(tail) is not None:
        return True
    if tail.lstrip(_BLANKS).startswith(b"{"):  # JSON, whatever its type says
        return True
    return len(tail) >= TAIL_BYTES and EVENT_END.search(tail.rstrip(_BLANKS)) is None


def shows_end(path: str, pieces: Sequence[bytes]) -> bool:
    """Whether the last ``pieces`` of a stream have the event after which nothing of the answer comes. Clients close the
    connection there, before the end of the body has come."""
    tail = b"".join(pieces)
    if path in COMPLETIONS_PATHS:  # a finish_reason is that of one choice alone, and usage comes behind it
        return _DONE.search(tail) is not None
    return path in _IS_LAST and _has_last_event(path, tail)


def _has_last_event(path: str, tail: bytes) -> bool:
    named = _NAMED_ENDS.get(path)
    if named is not None and named.search(tail) is not None:
        return True
    is_last = _IS_LAST[path]
    events = EVENT_END.split(tail)
    return any(is_last(found) for found in map(event_object, reversed(events)) if found is not None)


def _status_of(body: bytes) -> int:
    """The status that the error of an answer carries; 500 where it has none, or has not come whole."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 500
    return error_status(value if value.get("error") else {"error": value}) or 500


def _shown(body: bytes) -> str:
    return body[:_SHOWN_BYTES].decode("utf-8", "replace")


def retry_after_s(value: bytes | None, now_unix_s: float) -> float | None:
    """The pause that a ``retry-after`` names: seconds, or the time until an HTTP date; None where it names none."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_unix_s)
    except (TypeError, ValueError, OverflowError):
        return None
