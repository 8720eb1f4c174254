"""Server-sent events: where events end, and what the first ones contain.

A line ends with LF, CRLF or CR, and an empty line ends an event; the three may be mixed (WHATWG HTML, section 9.2). A
line that begins with a colon is a comment, which clients skip. Only the start of a stream is parsed, up to its first
token; from there bytes pass unread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from dualmap.router.answers.fields import is_aborted, usage_of_answer
from dualmap.scheduling.request.outcome import ENGINE_DEATH, Usage
from dualmap.scheduling.values import value

EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LONGEST_END: Final = 4
_AT_EVENT_END: Final = re.compile(EVENT_END.pattern + rb"\Z")
_BOM: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\n"
COMMENT: Final = b":\n\n"
"""Bytes that a client skips between two events."""
_COMMENTS: Final = re.compile(rb"(?:\xef\xbb\xbf)?(?:(?::[^\r\n]*)?(?:\r\n|\n|\r))*")
"""Whole lines that are comments, or empty."""

# A key named so is structure, not content: quotes inside of a JSON string are escaped.
_ERROR_EVENT: Final = re.compile(
    rb"(?:\A|(?<=[\r\n]))(?:"
    rb'data:\s*\{(?:\s|[\r\n]data:)*(?:"error"\s*:\s*\{|"type"\s*:\s*"(?:error|response\.failed)")'
    rb"|event: ?(?:error|response\.failed)[\r\n])"
)
_ERROR_WORDS: Final = (b'"error"', b"response.failed", b"event: error", b"event:error")
"""An error event has one of them; they are searched many times faster than it."""
_ENGINE_DEATH: Final = ENGINE_DEATH.encode()
_ABORT_WORDS: Final = (b'"abort"', b'"message_delta"', b'"cancelled"')
"""An event that says that its answer was aborted has one of them. Whether it says so, its fields tell."""
_USAGE: Final = b'"usage"'

_DELTA_OUTPUT: Final = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


class EventSplitter:
    """Cuts a byte stream into complete events.

    What it returns, and then ``rest``, are all bytes of the stream in their order. An event ends with the first byte
    that ends its empty line: an LF behind that CR is the begin of what follows, where it means nothing. With
    ``whole_ends`` an empty line that ends with CR, behind one that ends with CRLF, waits for its LF.
    """

    def __init__(self, limit_bytes: int, *, whole_ends: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._whole_ends = whole_ends
        self._rest = bytearray()

    @property
    def rest(self) -> bytes:
        """The part of an event that has come of it."""
        return bytes(self._rest)

    @property
    def too_long(self) -> bool:
        """An event that is not complete is longer than the limit."""
        return len(self._rest) > self._limit_bytes

    @property
    def only_comments(self) -> bool:
        """``rest`` has only whole lines that clients skip."""
        return _COMMENTS.fullmatch(self._rest) is not None

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes, with the empty lines that end them."""
        if not self._rest and b"\r" not in data:  # as engines write them: no pattern is needed
            *events, rest = data.split(b"\n\n")
            self._rest += rest
            return [event + b"\n\n" for event in events]
        searched = max(0, len(self._rest) - _LONGEST_END + 1)
        self._rest += data
        ends = [end.end() for end in EVENT_END.finditer(self._rest, searched)]
        if self._whole_ends and ends and ends[-1] == len(self._rest) and self._rest.endswith(b"\r\n\r"):
            ends.pop()
        if not ends:
            return []
        whole = bytes(self._rest[: ends[-1]])
        del self._rest[: ends[-1]]
        return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def take(self, count: int) -> bytes:
        """Remove the first bytes of ``rest``, and return them."""
        taken = bytes(self._rest[:count])
        del self._rest[:count]
        return taken


class EventEditor:
    """Passes a stream on by complete events, each of them as ``edit`` returns it.

    Comments pass at once, as ``comment`` returns them. Events that are longer than the limit pass in parts, as they
    are, and so does the part of an event with which a stream ends: behind what ``release`` returns, which is what
    ``edit`` has kept back.
    """

    def __init__(
        self,
        edit: Callable[[bytes], bytes],
        limit_bytes: int,
        *,
        comment: Callable[[bytes], bytes] = lambda data: data,
        release: Callable[[], bytes] = lambda: b"",
    ) -> None:
        self._edit = edit
        self._comment = comment
        self._release = release
        self._splitter = EventSplitter(limit_bytes, whole_ends=True)
        self._in_long_event = False

    def end(self) -> bytes:
        """The last bytes to pass on, of a stream that is over."""
        rest = self._splitter.take(len(self._splitter.rest))
        return self._edit(rest) if ends_event(rest) and not self._in_long_event else self._release() + rest

    @property
    def between_events(self) -> bool:
        """Whether the bytes passed on so far end with an event, or with a comment."""
        return not self._in_long_event

    @property
    def idle(self) -> bool:
        """Whether the next byte begins an event."""
        return not (self._in_long_event or self._splitter.rest)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return what is passed on; may be empty."""
        made = []
        for event in self._splitter.feed(data):
            if self._in_long_event:
                made.append(event)
                self._in_long_event = False
                continue
            skipped = _comment_bytes(event)
            if skipped:
                made.append(self._comment(event[:skipped]))
            if skipped < len(event):
                made.append(self._edit(event[skipped:]))
        if rest := self._splitter.rest:
            passable = self._passable(rest)
            passing = self._splitter.take(passable)
            if self._in_long_event:
                made += self._release(), passing
            elif passing:
                made.append(self._comment(passing))
        return b"".join(made)

    def _passable(self, rest: bytes) -> int:
        """How many bytes of an event that is not complete pass: not its last line ends, which may end it."""
        if self._in_long_event or self._splitter.too_long:
            self._in_long_event = True
            return len(rest.rstrip(b"\r\n"))
        return _comment_bytes(rest)


def _comment_bytes(data: bytes) -> int:
    """How many of its first bytes are whole lines that clients skip."""
    comments = _COMMENTS.match(data)
    return comments.end() if comments is not None else 0


def ends_event(data: bytes) -> bool:
    """Whether the last byte ends an event."""
    return _AT_EVENT_END.search(data[-_LONGEST_END:]) is not None


def is_comment(event: bytes) -> bool:
    """Whether clients skip all of it."""
    return _COMMENTS.fullmatch(event) is not None


def comments_of(event: bytes) -> bytes:
    """The lines of the event that are comments."""
    return b"".join(line for line in event.splitlines(keepends=True) if line.startswith(b":")) if b":" in event else b""


def first_event_bytes(data: bytes) -> int:
    """The length of the first event of some, with the empty line that ends it; of all of them, where none ends."""
    end = EVENT_END.search(data)
    return len(data) if end is None else end.end()


def event_data(event: bytes) -> bytes:
    """The joined ``data`` lines of an event; empty for a comment."""
    event = event.rstrip(b"\r\n")
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = event.removeprefix(_BOM).splitlines()
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:") or line == b"data")


def json_object(data: bytes) -> Mapping[str, Any] | None:
    """The JSON object that the bytes are; None where they are none."""
    if not data.lstrip(_BLANKS).startswith(b"{"):
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def event_object(event: bytes) -> Mapping[str, Any] | None:
    """The JSON object an event carries; None for comments, ``[DONE]`` and anything else."""
    return json_object(event_data(event))


def is_error(value: Mapping[str, Any] | None) -> bool:
    """True for vLLM's in-stream error ``{"error": {...}}``, and for Anthropic's ``{"type": "error", ...}``."""
    return value is not None and (bool(value.get("error")) or value.get("type") == "error")


def error_status(value: Mapping[str, Any] | None) -> int | None:
    """The status that an in-stream error carries as its code, 500 if it has none; None for other events."""
    if value is None or not is_error(value):
        return None
    error = value.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def starts_output(value: Mapping[str, Any] | None) -> bool:
    """True if the event shows that the prefill is over: content, reasoning, a tool call, completion text, or an end.

    A chunk with nothing but the role, and events that only announce an answer, do not.
    """
    if value is None:
        return False
    choices = value.get("choices")
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        usage = value.get("usage")
        counted = isinstance(usage, Mapping) and bool(usage.get("completion_tokens"))
        return counted or any(_choice_has_output(choice) for choice in choices)
    kind = value.get("type")  # /v1/responses and /v1/messages name their events
    return isinstance(kind, str) and kind.endswith(("delta", ".done", "message_stop", ".completed"))


def _choice_has_output(choice: object) -> bool:
    if not isinstance(choice, Mapping):
        return False
    if choice.get("text") or choice.get("finish_reason") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, Mapping) and any(delta.get(key) for key in _DELTA_OUTPUT)


@value
class Ending:
    """Findings in the last bytes of an answer."""

    usage: Usage | None = None
    """The usage of the answer; None where its instance has reported none."""
    error_status: int | None = None
    """The stream ended under status 200, but with an error event, of this code, or with an abort (500)."""
    engine_died: bool = False
    """Whether the error event says that the engine died."""
    aborted: bool = False
    """Whether ``finish_reason: abort`` ended the stream, not an error event."""


NO_ENDING: Final = Ending()


def ending_of_whole(body: bytes) -> Ending:
    """Find the usage in the body of a whole answer."""
    return Ending(usage_of_answer(json_object(body) or {})) if _USAGE in body else NO_ENDING


def ending_of_stream(pieces: Sequence[bytes]) -> Ending:
    """Find usage and failure in the last ``pieces`` of a stream. Costs nothing per piece: a few searches at the end,
    and the parsing of the events that they find."""
    data = b"".join(pieces)
    tail = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data
    usage = None
    if _USAGE in tail:
        usage = next(filter(None, map(usage_of_answer, events_with(_USAGE, tail))), None)
    status = _error_in(tail)
    aborted = False
    if status is None and _is_aborted_in(tail):
        status, aborted = 500, True
    died = status is not None and _ENGINE_DEATH in tail
    return Ending(usage, status, died, aborted)


def events_with(word: bytes, tail: bytes) -> Iterator[Mapping[str, Any]]:
    """The objects of the events at the end of a stream that have the word, the last one first. Lines end with LF."""
    end = len(tail)
    while (at := tail.rfind(word, 0, end)) >= 0:
        start = tail.rfind(b"\n\n", 0, at) + 1
        behind = tail.find(b"\n\n", at)
        found = event_object(tail[start : behind if behind >= 0 else len(tail)].lstrip(b"\n"))
        if found is not None:
            yield found
        end = start


def _is_aborted_in(tail: bytes) -> bool:
    return any(is_aborted(found) for word in _ABORT_WORDS if word in tail for found in events_with(word, tail))


def _find_error(tail: bytes) -> re.Match[bytes] | None:
    for word in _ERROR_WORDS:
        if word in tail:
            return _ERROR_EVENT.search(tail)
    return None


def _error_in(tail: bytes) -> int | None:
    found = _find_error(tail)
    if found is None:
        return None
    event = EVENT_END.split(tail[found.start() :], maxsplit=1)[0]
    return error_status(event_object(event)) or 500


def error_event(body: Mapping[str, Any]) -> bytes:
    """An in-stream error as vLLM and OpenAI send it; Anthropic's, which say their type, are named events."""
    name = b"event: error\n" if body.get("type") == "error" else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"
