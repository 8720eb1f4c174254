"""Checks whether what came under a status of success is an answer, as far as that shows without parsing it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Final

import orjson

from router.http.sse import EVENT_END, error_status, is_aborted
from router.inference_request import COMPLETIONS_PATHS, MESSAGES_PATH, RESPONSES_PATH, SCHEDULED_PATHS
from router.outcome import FailureKind, InstanceFailure
from scheduling.answers import Verdict

OBJECT_PATHS: Final = SCHEDULED_PATHS | {
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/detokenize",
    "/inference/v1/generate",
    "/tokenize",
}
"""Their answers are JSON or event streams, or bytes of a type that says so."""

_BLANKS: Final = b" \t\r\n"
_TEXT_TYPES: Final = (b"text/", b"application/json", b"application/xhtml", b"application/xml")
"""An answer of these types, or of none, that does not begin as JSON is a page or a message of something else than an
engine."""
_ERROR_START: Final = re.compile(rb'\s*\{\s*"(?:error"\s*:\s*[{"]|object"\s*:\s*"error")')
_SHOWN_BYTES: Final = 200

_LINE: Final = rb"(?:\A|(?<=[\r\n]))"
_DONE: Final = _LINE + rb"data:\s*\[DONE\]"
_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"|' + _DONE)
_LAST_EVENTS: Final = {
    **dict.fromkeys(COMPLETIONS_PATHS, _FINISHED),
    MESSAGES_PATH: re.compile(rb'"type"\s*:\s*"(?:message_stop|error)"|' + _DONE),
    RESPONSES_PATH: re.compile(
        rb'"type"\s*:\s*"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"'
        rb"|" + _LINE + rb"event:\s*(?:response\.(?:completed|incomplete|failed|cancelled)|error)|" + _DONE
    ),
}
"""What an event near the end of a whole stream contains, by path."""
_ERROR_EVENT: Final = re.compile(_LINE + rb'(?:data:\s*\{\s*"(?:error"|type"\s*:\s*"error")|event:\s*error)')
_LONG_EVENT_BYTES: Final = 4096


def failure_of_object(content_type: bytes, body: bytes) -> InstanceFailure | None:
    """The failure that an answer of success shows, of whose body this is the start, or the whole of it."""
    start = body.lstrip(_BLANKS)
    if not start:
        return InstanceFailure(FailureKind.NO_ANSWER, "an empty answer")
    if start[:1] not in (b"{", b"[") and (not content_type or content_type.lower().startswith(_TEXT_TYPES)):
        return InstanceFailure(FailureKind.NO_ANSWER, f"an answer that is not JSON: {_shown(start)}")
    if _ERROR_START.match(start) is not None:
        failure = InstanceFailure(FailureKind.STATUS, _shown(start), _status_of(start))
        return None if failure.verdict is Verdict.ANSWER else failure
    return ABORTED if is_aborted(body) else None


ABORTED: Final = InstanceFailure(FailureKind.ABORTED, "the instance aborted the answer (finish_reason: abort)")
TRUNCATED: Final = InstanceFailure(FailureKind.TRUNCATED, "the stream ended before the answer did")


def ends_whole(path: str, pieces: Sequence[bytes]) -> bool:
    """Whether the last ``pieces`` of a stream end its answer. True where that cannot be told: on other paths, and where
    the last event is longer than what is left of it."""
    last = _LAST_EVENTS.get(path)
    if last is None:
        return True
    tail = b"".join(pieces)
    if last.search(tail) is not None or _ERROR_EVENT.search(tail) is not None:
        return True
    if tail.lstrip(_BLANKS).startswith(b"{"):  # JSON, whatever its type says
        return True
    return len(tail) > _LONG_EVENT_BYTES and EVENT_END.search(tail.rstrip(_BLANKS)) is None


def _status_of(body: bytes) -> int:
    try:
        return error_status(orjson.loads(body)) or 500
    except (orjson.JSONDecodeError, AttributeError):
        return 500


def _shown(body: bytes) -> str:
    return body[:_SHOWN_BYTES].decode("utf-8", "replace")


def retry_after_s(value: bytes | None, now_unix_s: float) -> float | None:
    """The pause that a ``retry-after`` asks for: seconds, or the time until an HTTP date; None where it names none."""
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
