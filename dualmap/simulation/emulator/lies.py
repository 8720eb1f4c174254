"""Answers of an instance that looks healthy and is not: what a broken engine, or something in front of it, sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from dualmap.simulation.emulator.connection import Responder
from dualmap.simulation.emulator.errors import plain
from dualmap.simulation.emulator.generation_request import GenerationRequest
from dualmap.simulation.emulator.messages_api import MessageReply
from dualmap.simulation.emulator.openai_replies import OpenAiReply
from dualmap.simulation.emulator.replies import Ended, StreamReply, Usage


class Lie(StrEnum):
    """Wrong answers to a request for inference."""

    REDIRECT = "redirect"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    BUSY = "busy"
    """429 with ``retry-after``."""
    EMPTY = "empty"
    PAGE = "page"
    """A web page under 200."""
    ERROR_200 = "error_200"
    """An error under 200."""
    BROKEN = "broken"
    """The connection is lost after the first tokens, or in the middle of a whole answer."""
    ERROR_EVENT = "error_event"
    """A stream ends with an error after its first tokens; a whole answer is 500."""
    TRUNCATED = "truncated"
    """A stream ends after its first tokens as if it were whole; a whole answer is half of it."""
    ABORT = "abort"
    """The answer ends as one of an engine that shuts down, with ``finish_reason: abort``; a stream of responses, which
    has no word for that, breaks off."""


_STATUS: Final = {Lie.REDIRECT: 302, Lie.UNAUTHORIZED: 401, Lie.NOT_FOUND: 404, Lie.BUSY: 429}
_FIELDS: Final = {Lie.REDIRECT: "location: http://127.0.0.1:9/\r\n"}
_PAGE: Final = b"<!doctype html><html><body>It works!</body></html>"
_HONEST_WRITES: Final = 2


def lie_at_once(lie: Lie, responder: Responder, *, retry_after: str | None = None) -> bool:
    """Answer with the lie, if it needs no engine; ``retry_after`` is the field's value."""
    fields = _FIELDS.get(lie, "") if retry_after is None else f"retry-after: {retry_after}\r\n"
    if lie in _STATUS:
        responder.send(_STATUS[lie], plain(_STATUS[lie]).body(), fields=fields)
    elif lie is Lie.EMPTY:
        responder.send(200, b"")
    elif lie is Lie.PAGE:
        responder.send(200, _PAGE, "text/html; charset=utf-8")
    elif lie is Lie.ERROR_200:
        responder.send(200, plain(500).body())
    else:
        return False
    return True


def last_words(lie: Lie, gen_request: GenerationRequest, reply: StreamReply) -> bytes:
    """The events by which a lie ends a stream of this reply, in the form of its API; none: the stream breaks off."""
    if lie is Lie.ERROR_EVENT:
        return reply.broken(plain(500))
    if lie is Lie.ABORT and isinstance(reply, OpenAiReply | MessageReply):
        ended = Ended(0, "abort")
        ends = b"".join(reply.end(choice, 0, ended) for choice in range(len(gen_request.choices)))
        return ends + reply.closing([ended] * len(gen_request.choices), Usage(gen_request.prompt_tokens, 0, 0))
    return b""


class LyingResponder(Responder):
    """Spoils the answer that goes through it. ``words`` end a stream; see ``last_words``."""

    def __init__(self, honest: Responder, lie: Lie, words: bytes = b"") -> None:
        self._honest = honest
        self._lie = lie
        self._words = words
        self._writes = 0
        self._spoiled = False

    @property
    def on_disconnect(self) -> Callable[[], None] | None:
        return self._honest.on_disconnect

    @on_disconnect.setter
    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._honest.on_disconnect = callback

    @property
    def gone(self) -> bool:
        return self._honest.gone

    @gone.setter
    def gone(self, value: bool) -> None:
        self._honest.gone = value

    @property
    def writable(self) -> bool:
        return self._honest.writable

    def send(self, status: int, body: bytes, content_type: str = "application/json", *, fields: str = "") -> None:
        if self._lie is Lie.ERROR_EVENT:
            self._honest.send(500, plain(500).body())
        elif self._lie is Lie.ABORT:
            for reason in (b"length", b"stop"):
                body = body.replace(b'"finish_reason":"%b"' % reason, b'"finish_reason":"abort"')
            self._honest.send(status, body, content_type, fields=fields)
        else:
            self._honest.send_half(status, body, content_type)

    def start_stream(self) -> None:
        self._honest.start_stream()

    def write(self, data: bytes) -> None:
        self._writes += 1
        if self._writes <= _HONEST_WRITES:
            self._honest.write(data)
        else:
            self._spoil()

    def end_stream(self, data: bytes) -> None:
        self._spoil()

    def cut(self) -> None:
        self._honest.cut()

    def _spoil(self) -> None:
        if self._spoiled:
            return
        self._spoiled = True
        left = self.on_disconnect
        if self._lie is Lie.TRUNCATED or self._words:
            self._honest.end_stream(self._words)
        else:
            self._honest.cut()
        if left is not None:  # not from within the step of the engine that wrote
            asyncio.get_running_loop().call_soon(left)
