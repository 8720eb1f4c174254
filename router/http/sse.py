"""Server-sent events as vLLM streams them: where events end, and what the first ones contain.

Only the start of a stream is parsed, up to its first token; from there bytes pass unread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from router.outcome import ENGINE_DEATH
from scheduling.values import value

EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})')
_OUTPUT_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')
_CACHED_TOKENS: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})')
_APART_TOKENS: Final = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d{1,12})')
"""Prompt tokens that Anthropic's API does not count among ``input_tokens``."""
_TAIL_BYTES: Final = 16 << 10

# A key named so is structure, not content: quotes inside of a JSON string are escaped.
_ERROR_EVENT: Final = re.compile(
    rb'^data:\s*\{\s*(?:"error"\s*:\s*\{|"type"\s*:\s*"(?:error|response\.failed)")'
    rb"|^event: (?:error|response\.failed)\r?\n",
    re.MULTILINE,
)
_ENGINE_DEATH: Final = ENGINE_DEATH.encode()
_ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*"abort"')

_DELTA_OUTPUT: Final = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


class EventSplitter:
    """Cuts a byte stream into complete events; holds back at most ``limit_bytes`` of an incomplete one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes, without the empty lines that end them.

        Raises:
            ValueError: an event is longer than the limit.
        """
        if self._rest:
            data = self._rest + data
        events = EVENT_END.split(data)
        self._rest = events.pop()
        if len(self._rest) > self._limit_bytes:
            raise ValueError(f"an event is over {self._limit_bytes} bytes")
        return [event for event in events if event]


def event_data(event: bytes) -> bytes:
    """The joined ``data`` lines of an event; empty for a comment."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def event_object(event: bytes) -> Mapping[str, Any] | None:
    """The JSON object an event carries; None for comments, ``[DONE]`` and anything else."""
    data = event_data(event)
    if not data.startswith(b"{"):
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


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
    """What the last bytes of an answer contain."""

    prompt_tokens: int | None = None
    """As the instance counted them."""
    cached_tokens: int | None = None
    """Of those, found in its KV cache; None unless the instance reports it."""
    error_status: int | None = None
    """The stream ended under status 200, but with an error event, of this code, or with an abort (500)."""
    output_tokens: int | None = None
    """As the instance counted them."""
    engine_died: bool = False
    """From the error event."""


NO_ENDING: Final = Ending()


def read_ending(pieces: Sequence[bytes], *, streamed: bool) -> Ending:
    """Find usage and failure in the last ``pieces`` of a body; costs nothing per piece, a search at the end."""
    tail = b"".join(pieces)[-_TAIL_BYTES:]
    usage = tail.rfind(b'"usage"')
    status = _error_in(tail) if streamed else None
    died = status is not None and _ENGINE_DEATH in tail
    if usage < 0:
        return Ending(error_status=status, engine_died=died) if status is not None else NO_ENDING
    prompt, cached = _count(_PROMPT_TOKENS.search(tail, usage)), _count(_CACHED_TOKENS.search(tail, usage))
    output = _count(_OUTPUT_TOKENS.search(tail, usage))
    if prompt is not None:
        prompt += sum(int(count) for count in _APART_TOKENS.findall(tail, usage))
    return Ending(prompt, cached, status, output, died)


def _error_in(tail: bytes) -> int | None:
    found = _ERROR_EVENT.search(tail)
    if found is not None:
        event = EVENT_END.split(tail[found.start() :], maxsplit=1)[0]
        return error_status(event_object(event)) or 500
    return 500 if _ABORTED.search(tail) is not None else None


def _count(found: re.Match[bytes] | None) -> int | None:
    return int(found[1]) if found else None


def error_event(body: Mapping[str, Any]) -> bytes:
    """An in-stream error as vLLM and OpenAI send it; Anthropic's, which say their type, are named events."""
    name = b"event: error\n" if body.get("type") == "error" else b""
    return name + b"data: " + orjson.dumps(body) + b"\n\n"
