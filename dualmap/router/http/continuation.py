"""A stream whose instance could not finish it goes on with the answer of another one.

One that failed when the client had only comments of it goes on from its begin. One that failed in the middle goes on
from where it stopped, see ``rest_of_answer``: what comes then is another answer, of which each event is made one of the
first. The client sees one stream: the same id and time, no second role, nothing twice, and the usage of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dualmap.router.answers.continued_answer import ContinuedAnswer, error_in_form_of
from dualmap.router.answers.continued_response import ContinuedResponse
from dualmap.router.answers.last_words import failed_response
from dualmap.router.answers.response_so_far import named_event
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import EventEditor, error_event, event_object, first_event_bytes
from dualmap.router.errors import RouterError, UpstreamError, error_body
from dualmap.router.http.downstream import ByteSource, Downstream, NotLent
from dualmap.router.http.heads import Header, as_chunk
from dualmap.router.prompts.inference_request import RESPONSES_PATH
from dualmap.scheduling.request.outcome import Usage

_HEAD_END: Final = b"\r\n\r\n"
_MAX_HELD_BYTES: Final = 8 << 20
"""Most bytes that are held of an incomplete event; a longer one passes as it is."""


def client_of(downstream: Downstream) -> Downstream:
    """The client itself, of an answer that may go on in another one's stream."""
    return downstream._client if isinstance(downstream, Continuation) else downstream


class Continuation(NotLent):
    """The ``Downstream`` of an answer that goes on in the stream of another one."""

    http_10 = True
    """HTTP/1.0 is claimed, so that bodies come without chunks."""
    bodiless = False

    def __init__(
        self,
        client: Downstream,
        answer: ContinuedAnswer | ContinuedResponse | None = None,
        *,
        so_far: AnswerSoFar | None = None,
    ) -> None:
        """``answer`` is None while the client has no part of the answer: then the other answer passes as it is.
        ``so_far``: what the client has, where the stream is only to be ended."""
        self._client = client_of(client)
        self._answer = answer
        self._so_far = so_far if answer is None else answer.so_far
        self._editor = EventEditor(bytes if answer is None else answer.event, _MAX_HELD_BYTES)
        self.failed: UpstreamError | None = None
        """The error of another answer that does not go on where the client's ends."""
        self._source: ByteSource | None = None
        self._broken_off = False
        self.committed = False
        self.path = client.path if answer is None else answer.from_path
        """Path of the API that answers."""
        self.page_fields: Sequence[Header] = ()
        self.received_s = client.received_s

    @classmethod
    def again(cls, client: Downstream) -> Continuation:
        """The downstream for the next instance, after one of which the client has got comments alone."""
        return cls(client, client._answer if isinstance(client, Continuation) else None)

    def comment(self, data: bytes) -> None:
        """Send a comment."""
        self._send(data)

    def count(self, usage: Usage) -> Usage:
        """The usage of the whole answer, from that of its last part."""
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

    @property
    def gone(self) -> bool:
        return self._client.gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self._client.gone = gone

    def keeps_alive(self) -> bool:
        return True

    def write_head(self, head: bytes) -> None:
        """The client has one; what it announces comes as events. An error becomes the last of them."""
        self.committed = True
        fields, _, body = head.partition(_HEAD_END)
        if int(fields.split(b" ", 2)[1]) < 400:
            self.write(body)
        else:
            self.break_off(b"data: %b\n\n" % body.replace(b"\n", b""))

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
        """The answer is whole."""
        if self._broken_off:
            return
        if self.failed is not None:
            self.refuse(self.failed)
            return
        self._send(self._editor.end())
        if self._answer is not None:
            self._send(self._answer.end())
        self.close_stream()

    def untold_end(self) -> bytes:
        """The last events of an answer whose end has come in another form; empty where it came as it is, or has not."""
        return b"" if self._answer is None else self._answer.end()

    def close_stream(self, last_events: bytes = b"") -> None:
        """End the stream behind its last events."""
        self._send(last_events)
        if not self._client.http_10:
            self._client.write(b"0\r\n\r\n")

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        """The stream cannot go on."""
        self._broken_off = True
        body = error_body(error, self._client.path)
        is_response = self._client.path == RESPONSES_PATH
        words = self._failed_response(body["error"]) if is_response else error_event(body)
        self._client.break_off(self._framed(words))

    def break_off(self, last_words: bytes) -> None:
        self._broken_off = True
        found = event_object(last_words[: first_event_bytes(last_words)])
        words = last_words
        if found is not None and self._client.path == RESPONSES_PATH:
            words = self._last_of_response(last_words, found)
        elif found is not None:
            words = error_in_form_of(self._client.path, last_words, found)
        self._client.break_off(self._framed(words))

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

    def abort(self) -> None:
        self._client.abort()

    def set_source(self, source: ByteSource | None) -> None:
        self._source = source
        self._client.set_source(source)

    def close_after(self) -> None:
        self._client.close_after()

    def _send(self, data: bytes) -> None:
        if data:
            self._client.write(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        return data if self._client.http_10 or not data else as_chunk(data)
