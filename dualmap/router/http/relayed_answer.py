"""One answer that may pass the native relay: offered to it chunk by chunk, and given back by it.

While the relay has it, the transports of instance and client are as they were, but nothing is read from the one or
written to the other. Code that does either, or closes one of them, takes the answer back first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from dualmap.router.http.downstream import Downstream
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.router.relay.relay import FULL, MAX_BYTES, TAKEN, Relay, Returned

if TYPE_CHECKING:
    from dualmap.router.http.exchange import Exchange

_FEW_CHUNKS: Final = 4
_MOST_SHORT_STAYS: Final = 8
"""An answer that has come back so often after a few chunks is not plain, and is not offered again."""


class RelayedAnswer:
    """The answer of one exchange, from its first token on."""

    def __init__(
        self, relay: Relay, exchange: Exchange, connection: UpstreamConnection, downstream: Downstream
    ) -> None:
        self._relay = relay
        self._exchange = exchange
        self._connection = connection
        self._downstream = downstream
        self._key = 0
        self._short_stays = 0

    def take(self, data: bytes) -> bool:
        """Whether the relay takes the answer, from these bytes on, which begin a chunk."""
        connection, downstream = self._connection, self._downstream
        may_lend = len(data) <= MAX_BYTES and downstream.may_lend()
        terms = self._exchange.terms_of_relay(len(data)) if may_lend else None
        if terms is None:
            return False
        flags, log_limit = terms
        mark = self._exchange.output_mark
        key = self._relay.attach(self, connection.file, downstream.file, flags, log_limit, data, mark)
        if not key:
            self._count_stay(0)
            return False
        self._key = key
        connection.lend(self)
        downstream.lend(self)
        return True

    def progressed(self) -> bool:
        """Whether bytes have come since the last call."""
        return self._relay.progressed(self._key)

    def take_back(self) -> None:
        """Go on without the relay, from where it is."""
        stream = self._relay.take(self._key)
        if stream is not None:
            self.given_back(stream._replace(reason=TAKEN))  # for any reason: it is not offered again at once

    def end(self) -> None:
        """The answer ends with what has passed; what has not is dropped."""
        stream = self._relay.take(self._key)
        if stream is not None:
            self._end_stay(stream)

    def drop(self) -> None:
        """The answer is over, and nothing of it is needed any more."""
        if self._relay.take(self._key) is not None:
            self._end_loan()

    def given_back(self, stream: Returned) -> None:
        self._end_stay(stream)
        self._count_stay(stream.chunks)
        error = OSError(stream.errno, os.strerror(stream.errno)) if stream.errno else None
        self._connection.go_on(stream.unread, error, offers=stream.reason == FULL)

    def _end_stay(self, stream: Returned) -> None:
        """Take over what the relay has passed on, and send the client what is left of that."""
        self._end_loan()
        self._exchange.relayed(stream.tail, stream.log, stream.outputs)
        if stream.unsent:
            self._downstream.write(stream.unsent)

    def _end_loan(self) -> None:
        self._key = 0
        self._connection.end_loan()
        self._downstream.end_loan()

    def _count_stay(self, chunks: int) -> None:
        if chunks < _FEW_CHUNKS:
            self._short_stays += 1
            if self._short_stays >= _MOST_SHORT_STAYS:
                self._connection.offer = None
