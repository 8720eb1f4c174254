"""Receivers of answers that no client sees: that of a prefill leg, and of legs whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from dualmap.router.errors import RouterError
from dualmap.router.http.downstream import ByteSource, NotLent
from dualmap.router.http.exchange import Exchange
from dualmap.router.http.exchange_result import ExchangeResult, failure_of_whole
from dualmap.router.http.heads import Header
from dualmap.router.http.upstream import AnswerHead
from dualmap.scheduling.request.charge import NOTHING_COUNTED, Counted
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure

_OUTPUT: Final = b'"choices"'
_MAX_BEGUN_BYTES: Final = 64 << 10


class NoClient(NotLent):
    """A ``Downstream`` that nothing is ever sent to."""

    path = ""
    page_fields: Sequence[Header] = ()
    received_s = 0.0
    http_10 = False
    bodiless = False
    committed = False
    gone = False

    def keeps_alive(self) -> bool:
        return True

    def write_head(self, head: bytes) -> None: ...

    def write(self, data: bytes) -> None: ...

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None: ...

    def set_source(self, source: ByteSource | None) -> None: ...

    def close_after(self) -> None: ...

    def abort(self) -> None: ...

    def break_off(self, last_words: bytes) -> None: ...


NO_CLIENT: Final = NoClient()


class PrefillExchange(Exchange):
    """The exchange of a prefill leg. Its answer is kept until it is whole, and then part of the result, as is a client
    error."""

    def head_received(self, head: AnswerHead) -> None:
        super().head_received(head)
        if not self._failing_status:
            self._receive = Exchange._hold

    def counted(self) -> Counted:
        """Return nothing: no client gets it."""
        return NOTHING_COUNTED

    def _complete(self) -> None:
        head = self._head
        assert head is not None
        if self._failing_status:
            return super()._complete()
        body = self.held_body()
        if head.status < 400 and (failure := failure_of_whole(body)) is not None:
            return self._fail(failure)
        return self._settle(ExchangeResult(head.status, body=body))


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
