"""The parts of one client's answer: what instances give of it, one after the other or at once.

The first part brings the head. Its bytes go as they came, where both sides have the same framing. One that fails when
the client has only comments, or whole events that are kept, is followed by a later part: the answer of another
instance, of which each event is made one of the first. The client sees one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from dualmap.router.answers.continued_answer import ContinuedAnswer, error_in_form_of
from dualmap.router.answers.continued_response import ContinuedResponse
from dualmap.router.answers.head import AnswerHead, ErrorAnswer, Framing
from dualmap.router.answers.last_words import failed_response
from dualmap.router.answers.response_so_far import named_event
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import COMMENT, EventEditor, error_event, event_object, first_event_bytes
from dualmap.router.errors import RouterError, UpstreamError, error_body
from dualmap.router.http.downstream import ByteSource, Downstream
from dualmap.router.http.heads import as_chunk, fields_for_client, response_head
from dualmap.router.http.plain_heads import Header
from dualmap.router.prompts.inference_request import RESPONSES_PATH
from dualmap.scheduling.request.outcome import Usage

_LENGTH: Final = Framing.LENGTH
_CHUNKED: Final = Framing.CHUNKED
_EMPTY: Final = Framing.EMPTY
_UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE
_END: Final = b"0\r\n\r\n"
_MAX_HELD_BYTES: Final = 8 << 20
"""Most bytes that are held of an incomplete event; a longer one passes as it is."""


class FirstPart:
    """The part with which an answer begins."""

    is_first = True
    failed: UpstreamError | None = None
    _chunks = False
    """Chunks towards the client are made here."""
    _has_length = False

    def __init__(self, client: Downstream) -> None:
        self.client = client
        self.path = client.path
        """Path of the API that answers."""

    @property
    def has_begun(self) -> bool:
        """Something of it was written."""
        return self.client.committed

    @property
    def file(self) -> int:
        """Descriptor of a connection to the client that takes its bytes as they are; else -1."""
        return -1 if self.client.http_10 or self.client.bodiless else self.client.file

    def strips(self, head: AnswerHead) -> bool:
        """Whether its bytes have to come without the instance's framing."""
        return head.framing is _UNTIL_CLOSE or (self.client.http_10 and head.framing is _CHUNKED)

    def send(
        self, head: AnswerHead, fields: Callable[[], list[Header]], data: bytes, is_bare: bool, source: ByteSource
    ) -> Callable[[bytes], None]:
        """Send the head, and the first bytes behind it. Returns what writes the next ones.

        Args:
            fields: makes the fleet's fields.
            is_bare: its bytes come without the instance's framing.
        """
        client, framing = self.client, head.framing
        sent = fields_for_client(head.fields, has_connection=b"connection" in head.index)
        sent += fields()
        if framing is _LENGTH:
            self._has_length = True
            sent.append((b"content-length", head.index.get(b"content-length", b"0")))
        elif framing is not _EMPTY and not client.http_10:
            self._chunks = is_bare
            sent.append((b"transfer-encoding", b"chunked"))
        if not client.keeps_alive():
            sent.append((b"connection", b"close"))
        client.set_source(source)
        client.write_head(response_head(head.status, sent, as_chunk(data) if self._chunks else data))
        return self._write_chunk if self._chunks else client.write

    def _write_chunk(self, data: bytes) -> None:
        self.client.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """All of the part is written."""
        if self._chunks:
            self.client.write(_END)

    def insert(self, event: bytes, *, between_chunks: bool) -> None:
        """Write an event of the router's own, where the framing lets it."""
        self.client.write(self._framed(event, between_chunks))

    def break_off(self, words: bytes, *, between_chunks: bool) -> None:
        self.client.break_off(self._framed(words, between_chunks) if words else words)

    def _framed(self, event: bytes, between_chunks: bool) -> bytes:
        """``event`` as the client's framing wants it; empty where it would land inside of a chunk, or of a length."""
        if self._has_length:
            return b""
        if self.client.http_10:
            return event
        return as_chunk(event) if self._chunks or between_chunks else b""

    def release(self) -> None:
        """The instance gives no more."""
        self.client.set_source(None)

    # for the request ---------------------------------------------------------------------------------------------
    def again(self) -> LaterPart:
        """The part of the next instance, after this one, of which the client has comments alone."""
        return LaterPart(self.client)

    def finish(self) -> None:
        """No part follows."""

    def unsent_end(self) -> bytes:
        """The last events of an answer whose end has come in another form; empty where it came as it is, or has not."""
        return b""

    def count(self, usage: Usage) -> Usage:
        """The usage of the whole answer, from that of this part."""
        return usage

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        """No instance gives it."""
        self.client.refuse(error, fields)

    def pass_on(self, answer: ErrorAnswer, fields: Callable[[], list[Header]]) -> None:
        """Send an instance's own error."""
        client = self.client
        sent = [*fields_for_client(answer.fields), *fields(), (b"content-length", b"%d" % len(answer.body))]
        if not client.keeps_alive():
            sent.append((b"connection", b"close"))
        client.write_head(response_head(answer.status, sent, answer.body))


class LaterPart:
    """A part that goes on in the client's stream, which has a head."""

    is_first = False
    file = -1

    def __init__(
        self,
        client: Downstream,
        answer: ContinuedAnswer | ContinuedResponse | None = None,
        *,
        so_far: AnswerSoFar | None = None,
    ) -> None:
        """``answer`` is None while the client has no part of the answer: then the other answer passes as it is.
        ``so_far``: what the client has, where the stream is only to be ended."""
        self.client = client
        self._answer = answer
        self._so_far = so_far if answer is None else answer.so_far
        self._editor = EventEditor(bytes if answer is None else answer.event, _MAX_HELD_BYTES)
        self.failed: UpstreamError | None = None
        """The error of another answer that does not go on where the client's ends."""
        self._source: ByteSource | None = None
        self._broken_off = False
        self.has_begun = False
        """Something of it was written."""
        self.path = client.path if answer is None else answer.from_path
        """Path of the API that answers."""

    # for the answer of its instance ------------------------------------------------------------------------------
    def strips(self, head: AnswerHead) -> bool:
        """Whether its bytes have to come without the instance's framing."""
        return True

    def send(
        self, head: AnswerHead, fields: Callable[[], list[Header]], data: bytes, is_bare: bool, source: ByteSource
    ) -> Callable[[bytes], None]:
        """Send the first bytes: the client has a head, and what this one announces comes as events. An error becomes
        the last of them."""
        self.has_begun = True
        self._set_source(source)
        if head.status < 400:
            self.write(data)
        else:
            self._say_last(b"data: %b\n\n" % data.replace(b"\n", b""))
        return self.write

    def write(self, data: bytes) -> None:
        """Pass complete events on."""
        if self._answer is None:
            self._send(data)
        elif self.failed is None:
            try:
                self._send(self._editor.feed(data))
            except UpstreamError as error:
                self.failed = error
                if self._source is not None:
                    self._source.give_up(error)

    def end(self) -> None:
        """All of the part is written; ``finish`` ends the stream."""

    def insert(self, event: bytes, *, between_chunks: bool) -> None:
        """Write an event of the router's own."""
        self._send(event)

    def break_off(self, words: bytes, *, between_chunks: bool) -> None:
        self._say_last(words)

    def release(self) -> None:
        """The instance gives no more."""
        self._set_source(None)

    def _set_source(self, source: ByteSource | None) -> None:
        self._source = source
        self.client.set_source(source)

    # for the request ---------------------------------------------------------------------------------------------
    def again(self) -> LaterPart:
        """The part of the next instance, after this one, of which the client has comments alone."""
        return LaterPart(self.client, self._answer)

    def comment(self, data: bytes) -> None:
        """Send a comment."""
        self._send(data)

    def count(self, usage: Usage) -> Usage:
        """The usage of the whole answer, from that of this part."""
        prompt_tokens, output_tokens = usage.prompt_tokens, usage.output_tokens
        tokens = 0 if self._answer is None else self._answer.tokens
        prompt_tokens = None if prompt_tokens is None else prompt_tokens - tokens
        cached_tokens = usage.cached_tokens
        if cached_tokens is not None and prompt_tokens is not None:
            cached_tokens = min(cached_tokens, prompt_tokens)
        return replace(
            usage,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=None if output_tokens is None else output_tokens + tokens,
        )

    def finish(self) -> None:
        """No part follows, and this one is whole."""
        if self._broken_off:
            return
        if self.failed is not None:
            self.refuse(self.failed)
            return
        self._send(self._editor.end())
        if self._answer is not None:
            self._send(self._answer.end())
        self.close_stream()

    def unsent_end(self) -> bytes:
        """The last events of an answer whose end has come in another form; empty where it came as it is, or has not."""
        return b"" if self._answer is None else self._answer.end()

    def close_stream(self, last_events: bytes = b"") -> None:
        """End the stream behind its last events."""
        self._send(last_events)
        if not self.client.http_10:
            self.client.write(_END)

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        """The stream cannot go on."""
        self._broken_off = True
        body = error_body(error, self.client.path)
        is_response = self.client.path == RESPONSES_PATH
        words = self._failed_response(body["error"]) if is_response else error_event(body)
        self.client.break_off(self._framed(words))

    def pass_on(self, answer: ErrorAnswer, fields: Callable[[], list[Header]]) -> None:
        """Send an instance's own error, as the last event."""
        self.has_begun = True
        self._say_last(b"data: %b\n\n" % answer.body.replace(b"\n", b""))

    def _say_last(self, words: bytes) -> None:
        """Break the stream off with an error event of the API that answers."""
        self._broken_off = True
        found = event_object(words[: first_event_bytes(words)])
        if found is not None and self.client.path == RESPONSES_PATH:
            words = self._last_of_response(words, found)
        elif found is not None:
            words = error_in_form_of(self.client.path, words, found)
        self.client.break_off(self._framed(words))

    def _last_of_response(self, words: bytes, found: Mapping[str, Any]) -> bytes:
        """The last events of the client's response, of which another one, or an engine, has the words."""
        so_far = None if self._so_far is None else self._so_far.response
        response, error = found.get("response"), found.get("error")
        if isinstance(response, dict) and so_far is not None and not so_far.is_continued:
            return named_event(so_far.numbered(found))
        if isinstance(response, dict):
            error = response.get("error")
        return self._failed_response(error) if isinstance(error, dict) else words

    def _failed_response(self, error: Mapping[str, Any]) -> bytes:
        so_far = self._so_far
        if so_far is None or so_far.response is None:
            return failed_response(error, 0)
        return failed_response(error, so_far.response.next_number, so_far.envelope, so_far.response)

    def _send(self, data: bytes) -> None:
        if data:
            self.client.write(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        return data if self.client.http_10 or not data else as_chunk(data)


Part = FirstPart | LaterPart


class SharedStream:
    """The stream of several answers at once, each written by whole events. Their sources pause together, and the first
    that breaks the stream off ends it: the caller then sends ``last_words``, once all of them are over, as that closes
    the connection."""

    def __init__(self, client: Downstream) -> None:
        """``client``: has got the head of a stream, and whole events of it."""
        self.client = client
        self.last_words: bytes | None = None
        """The error event of the first answer that broke off; None: none did."""
        self._sources: dict[SharedPart, ByteSource] = {}
        self._is_paused = False
        client.set_source(self)

    def set_source(self, part: SharedPart, source: ByteSource | None) -> None:
        """Connect one answer's source, or none."""
        if source is None:
            self._sources.pop(part, None)
            return
        self._sources[part] = source
        if self._is_paused:
            source.pause_reading()

    def pause_reading(self) -> None:
        self._is_paused = True
        for source in self._sources.values():
            source.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        for source in self._sources.values():
            source.resume_reading()

    def probe(self) -> None:
        for source in tuple(self._sources.values())[:1]:
            source.probe()
        if not self._sources:
            LaterPart(self.client).comment(COMMENT)

    def give_up(self, error: RouterError) -> None:
        for source in tuple(self._sources.values()):
            source.give_up(error)

    @property
    def is_broken_off(self) -> bool:
        return self.last_words is not None


class SharedPart(LaterPart):
    """The rest of one of several answers. Its end is not that of the stream."""

    def __init__(self, shared: SharedStream, answer: ContinuedAnswer) -> None:
        super().__init__(shared.client, answer)
        self._shared = shared

    def _set_source(self, source: ByteSource | None) -> None:
        self._source = source
        self._shared.set_source(self, source)

    def write(self, data: bytes) -> None:
        if not self._shared.is_broken_off:
            super().write(data)

    def finish(self) -> None:
        """Pass on what is left of this answer."""
        if not self._shared.is_broken_off:
            self._send(self._editor.end())

    def _say_last(self, words: bytes) -> None:
        if not self._shared.is_broken_off:
            self._shared.last_words = words
