"""An exchange that keeps what its client was sent of a stream, so that another decoder can go on with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from dualmap.router.http.exchange import MAX_HELD_BYTES, Exchange
from dualmap.router.http.exchange_result import GIVEN_BACK, ErrorAnswer, ExchangeResult, where_given_back
from dualmap.router.http.heads import as_chunk
from dualmap.router.http.sse import EVENT_END
from dualmap.router.http.upstream import Framing
from dualmap.scheduling.request.outcome import InstanceFailure

MAX_KEPT_BYTES: Final = 1 << 20
"""Most bytes that are kept of a stream's events; a longer stream is not continued."""


class KeptEvents:
    """Events of a stream that may be continued, as the client was sent them."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0

    def add(self, pieces: Sequence[bytes]) -> None:
        self._bytes += sum(map(len, pieces))
        if self._bytes <= MAX_KEPT_BYTES:
            self._pieces += pieces
        else:
            self._pieces.clear()

    def before(self, mark: int, pieces: Sequence[bytes]) -> tuple[bytes, bytes] | None:
        """All events before the one that has the byte ``mark`` of the next ``pieces``: those passed on, and those that
        come with it. None where they are not kept, or a part of that event was passed on."""
        sent, more = b"".join(self._pieces), b"".join(pieces)
        start = max((end.end() for end in EVENT_END.finditer(sent + more, 0, len(sent) + mark)), default=0)
        if self._bytes > MAX_KEPT_BYTES or start < len(sent):
            return None
        return sent, more[: start - len(sent)]


class KeepingExchange(Exchange):
    """The exchange of a decoder's stream. A stream that is given back in the middle is read to its end, which counts
    its tokens; its result has ``sent_events``, and the client's stream stays open."""

    _kept: KeptEvents | None = None
    """Events that are kept, once the answer has begun."""
    _sent_events: bytes | None = None
    """Events that the client was sent, once the stream was given back."""

    def _send_held(self) -> None:
        if self._event_stream and not self._downstream.committed:
            self._kept = KeptEvents()
        if self._kept is not None and self._held_bytes <= MAX_HELD_BYTES:
            self._kept.add([piece for _, pieces in self._held for piece in pieces])
        else:
            self._kept = None
        super()._send_held()

    def _first_token(self) -> None:
        super()._first_token()
        if self._kept is not None:
            self._receive = cast("Any", KeepingExchange._keep)

    def _keep(self, wire: bytes, pieces: list[bytes]) -> None:
        assert self._kept is not None
        if self._tells_given_back(wire):
            self._give_back(pieces)
        else:
            self._kept.add(pieces)
            self._pass(wire, pieces)

    def _give_back(self, pieces: list[bytes]) -> None:
        head, mark = self._head, where_given_back(b"".join(pieces))
        assert head is not None
        assert self._kept is not None
        spliced = self._reframe is None
        fits = head.framing is not Framing.LENGTH and (not spliced or self._last_wire.endswith(b"\r\n"))
        known = self._kept.before(mark, pieces) if mark is not None and fits and self._between_events() else None
        if known is None:
            self._connection.abort()
            return self._fail(GIVEN_BACK)
        sent, more = known
        if more:
            self._downstream.write(as_chunk(more) if self._reframe is None else self._reframe([more]))
        self._sent_events, self._unsent = sent + more, [b"".join(pieces)[len(more) :]]
        self._receive = cast("Any", KeepingExchange._read_on)
        return None

    def _read_on(self, _: bytes, pieces: list[bytes]) -> None:
        self._unsent += pieces

    def _complete(self) -> None:
        if self._sent_events is None:
            super()._complete()
        else:
            self._settle_given_back(self._sent_events)

    def _fail(self, failure: InstanceFailure, *, answer: ErrorAnswer | None = None, overdue: bool = False) -> None:
        if self._sent_events is None:
            super()._fail(failure, answer=answer, overdue=overdue)
        else:
            self._connection.abort()
            self._settle_given_back(self._sent_events)

    def _settle_given_back(self, sent: bytes) -> None:
        assert self._head is not None
        unsent = b"".join(self._unsent)
        self._settle(ExchangeResult(self._head.status, failure=GIVEN_BACK, sent_events=sent, unsent_events=unsent))
