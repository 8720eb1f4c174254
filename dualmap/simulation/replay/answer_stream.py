"""Reading a streamed answer: when its first content came, how it ended, and its usage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import orjson

EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
"""An empty line: each line ends with LF, CRLF or CR."""
_KEEP_BYTES = 32 * 1024
"""Bytes that are kept of the end of a long stream: the finish reason and the usage are there."""
_CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class AnswerStream:
    """Takes the bytes of one stream of server-sent events as they come.

    Events are parsed up to the first content; after it only the last ones, when the stream is over. An answer that is
    one JSON object, as errors are, is taken as one event.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.first_content_s: float | None = None
        """When the first text, reasoning or tool call arrived. A role alone is no content."""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.error: str | None = None
        self.error_code: str | None = None
        """A word, as ``no_instance``; None if there is none, or a number alone."""
        self.done = False
        """The stream ended as it should, with ``[DONE]``."""
        self._now_s = now_s
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """The next bytes of the stream."""
        self._buffer += data
        if self.first_content_s is None:
            self._read_events()
        elif len(self._buffer) > 2 * _KEEP_BYTES:
            del self._buffer[:-_KEEP_BYTES]

    def close(self) -> None:
        """The stream is over: read its end."""
        self._buffer += b"\n\n"
        self._read_events()

    def _read_events(self) -> None:
        *events, rest = EVENT_END.split(self._buffer)
        self._buffer = bytearray(rest)
        for event in events:
            if event.startswith(b"{"):
                self._note(event)
            payload = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:")).strip()
            if payload == b"[DONE]":
                self.done = True
            elif payload:  # else a comment, or an event whose head has been dropped
                self._note(payload)

    def _note(self, payload: bytes) -> None:
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return
        if not isinstance(chunk, dict):
            return
        error = chunk.get("error")
        if error is not None:
            self.error = str(error.get("message")) if isinstance(error, dict) else str(error)
            code = error.get("code") if isinstance(error, dict) else None
            self.error_code = code if isinstance(code, str) else None
        if isinstance(chunk.get("usage"), dict):
            self.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            has_content = choice.get("text") or any(delta.get(name) for name in _CONTENT_FIELDS)
            if has_content and self.first_content_s is None:
                self.first_content_s = self._now_s()
