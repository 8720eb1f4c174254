"""Receivers of answers that no client sees: that of a prefill leg, and of legs whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from router.errors import RouterError
from router.http.attempt import ErrorAnswer, failure_of_whole
from router.http.downstream import ByteSource
from router.http.heads import Header
from router.http.upstream import AnswerHead
from router.outcome import FailureKind, InstanceFailure

_HEAD_END: Final = b"\r\n\r\n"
_OUTPUT: Final = b'"choices"'
_MAX_BEGUN_BYTES: Final = 64 << 10


class LegAnswer:
    """A ``Downstream`` that keeps the answer, without its framing."""

    page_fields: Sequence[Header] = ()
    http_10 = True
    """So bodies come without chunks."""
    bodiless = False
    gone = False

    def __init__(self, path: str, asked_s: float) -> None:
        self.path = path
        self.asked_s = asked_s
        self.committed = False
        self._parts: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def as_error(self, status: int) -> ErrorAnswer:
        return ErrorAnswer(status, [(b"content-type", b"application/json")], self.body)

    def keeps_alive(self) -> bool:
        return True

    def write_head(self, head: bytes) -> None:
        self.committed = True
        self._parts = [head.partition(_HEAD_END)[2]]

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None: ...

    def set_source(self, source: ByteSource | None) -> None: ...

    def close_after(self) -> None: ...

    def abort(self) -> None: ...

    def break_off(self, last_words: bytes) -> None: ...


class LateAnswer:
    """An ``AnswerSink`` of a leg whose client has left. It waits for the first output, or for the whole answer, and
    keeps what has come of its body. An answer without output has failed, also one that is an error under the status of
    a stream."""

    def __init__(self, *, whole: bool, begun: bytes = b"") -> None:
        """``begun`` has come of the body before."""
        self.done: asyncio.Future[InstanceFailure | None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.body = begun
        self._whole = whole

    def head_received(self, head: AnswerHead) -> None:
        self.status = head.status

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        self.body += b"".join(pieces)
        if self._whole:
            if complete:
                self._settle(None)
        elif _OUTPUT in self.body:
            self._settle(None)
        elif complete or len(self.body) > _MAX_BEGUN_BYTES:
            self._settle(failure_of_whole(self.body))

    def failed(self, failure: InstanceFailure) -> None:
        self._settle(failure)

    def probe(self) -> None: ...

    def cut_off(self, error: RouterError) -> None:
        self._settle(InstanceFailure(FailureKind.CLOSED, str(error)))

    def _settle(self, failure: InstanceFailure | None) -> None:
        if not self.done.done():
            self.done.set_result(failure)
