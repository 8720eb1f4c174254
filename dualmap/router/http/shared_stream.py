"""One client's stream into which several instances' answers are written at once, each by whole events."""

from __future__ import annotations

from collections.abc import Iterable

from dualmap.router.answers.continued_answer import ContinuedAnswer
from dualmap.router.answers.sse import COMMENT, error_event
from dualmap.router.errors import RouterError, error_body
from dualmap.router.http.continuation import Continuation
from dualmap.router.http.downstream import ByteSource, Downstream
from dualmap.router.http.heads import Header


class SharedStream:
    """The client of several answers. Their sources pause together, and the first that breaks the stream off ends it:
    the caller then sends ``last_words``, once all of them are over, as that closes the connection."""

    def __init__(self, client: Downstream) -> None:
        """``client``: has got the head of a stream, and whole events of it."""
        self.client = client
        self.last_words: bytes | None = None
        """The error event of the first answer that broke off; None: none did."""
        self._sources: dict[AnswerInStream, ByteSource] = {}
        self._is_paused = False
        client.set_source(self)

    def set_source(self, answer: AnswerInStream, source: ByteSource | None) -> None:
        """Connect one answer's source, or none."""
        if source is None:
            self._sources.pop(answer, None)
            return
        self._sources[answer] = source
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
            Continuation(self.client).comment(COMMENT)

    def give_up(self, error: RouterError) -> None:
        for source in tuple(self._sources.values()):
            source.give_up(error)

    @property
    def is_broken_off(self) -> bool:
        return self.last_words is not None


class AnswerInStream(Continuation):
    """One of the answers. Its end is not that of the stream."""

    def __init__(self, shared: SharedStream, answer: ContinuedAnswer) -> None:
        super().__init__(shared.client, answer)
        self._shared = shared

    def set_source(self, source: ByteSource | None) -> None:
        self._source = source
        self._shared.set_source(self, source)

    def write(self, data: bytes) -> None:
        if not self._shared.is_broken_off:
            super().write(data)

    def end(self) -> None:
        """Pass on what is left of this answer."""
        if not self._shared.is_broken_off:
            self._send(self._editor.end())

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        self.break_off(error_event(error_body(error, self._client.path)))

    def break_off(self, last_words: bytes) -> None:
        if not self._shared.is_broken_off:
            self._shared.last_words = last_words
