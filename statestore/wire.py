"""One connection to a Redis server: commands out in batches, replies back in order.

Commands of all callers within one turn of the event loop leave in one write, so a busy replica pays for the
kernel and the server's wake-up once per batch. A command that finds nothing under way leaves at once: an idle server
need not wait for the next turn. Replies are matched by order, as RESP prescribes. There is no timer per command: a
sweep looks at the oldest one alone, as no younger reply can overtake it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from statestore.errors import StoreUnavailableError
from statestore.replies import MovedElsewhereError, reply_error

MAX_IN_FLIGHT = 16_384
"""Commands sent and unanswered at which no more are sent; a server that far behind is not available."""
_SWEEPS_PER_TIMEOUT = 4
_NO_REPLY_YET = object()


class ConnectionLostError(StoreUnavailableError):
    """The connection ended before the reply came."""


PushHandler = Callable[[list[Any]], None]
"""Takes the messages of subscribed channels. The confirmation of SUBSCRIBE, of one channel at a time, is a reply."""


class Wire(asyncio.Protocol):
    """A connection from ``connection_made`` to ``connection_lost``; never reused."""

    def __init__(
        self,
        timeout_s: float,
        *,
        on_lost: Callable[[Wire], None],
        on_push: PushHandler | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._on_push = on_push
        self._reader = hiredis.Reader(replyError=reply_error, notEnoughData=_NO_REPLY_YET)
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._in_flight: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[Any] | None = None
        self._given_up_because: str | None = None
        """Why this side ended it, or the server's words when it takes nobody; None: it was lost."""

    # commands ----------------------------------------------------------------------------------------------
    def send(self, command: bytes, timeout_s: float | None = None) -> asyncio.Future[Any]:
        """Send a packed command, at once or with its turn's others; the future has its reply or a ``StoreError``."""
        in_flight, transport = self._in_flight, self._transport
        if transport is None or len(in_flight) >= MAX_IN_FLIGHT:
            return self._refused()
        return self._send(transport, command, timeout_s)

    def send_together(self, commands: Sequence[bytes]) -> list[asyncio.Future[Any]]:
        """``send`` for commands of one transaction: all of them leave, or none. Room for the first is room for all."""
        transport = self._transport
        if transport is None or len(self._in_flight) >= MAX_IN_FLIGHT:
            return [self._refused()]
        return [self._send(transport, command) for command in commands]

    def _refused(self) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if self._transport is None:
            future.set_exception(self._ended())
        else:
            future.set_exception(StoreUnavailableError("the store is too far behind: too many calls wait for it"))
        return future

    def _ended(self, cause: str = "") -> StoreUnavailableError:
        """What callers are told once the connection is no more."""
        if self._given_up_because is not None:
            return StoreUnavailableError(self._given_up_because)
        return ConnectionLostError(f"the connection to the store was lost{cause}")

    def _send(
        self, transport: asyncio.Transport, command: bytes, timeout_s: float | None = None
    ) -> asyncio.Future[Any]:
        future, in_flight = self._loop.create_future(), self._in_flight
        if in_flight or self._outgoing:
            self._write(command)
        else:
            transport.write(command)
        in_flight.append((future, self._loop.time() + (timeout_s or self._timeout_s)))
        if self._sweep_timer is None:
            self._sweep_later()
        return future

    def _write(self, command: bytes) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(command)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def abort(self) -> None:
        """Drop the connection now; whatever is in flight fails."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol --------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NO_REPLY_YET:
                self._accept(reply)
        except hiredis.ProtocolError:
            self.abort()

    def _accept(self, reply: Any) -> None:
        if self._on_push is not None and isinstance(reply, list) and reply and reply[0] == b"message":
            self._on_push(reply)
            return
        if not self._in_flight:
            if isinstance(reply, Exception):
                self._given_up_because = str(reply)
            self.abort()
            return
        future, _ = self._in_flight.popleft()
        if isinstance(reply, Exception):
            if isinstance(reply, MovedElsewhereError):
                self.abort()
            if not future.done():
                future.set_exception(reply)
        elif not future.done():
            future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        cause = f": {exc}" if exc is not None else ""
        while self._in_flight:
            future, _ = self._in_flight.popleft()
            if not future.done():
                future.set_exception(self._ended(cause))
        self._on_lost(self)

    # timeouts ----------------------------------------------------------------------------------------------
    def _sweep_later(self) -> None:
        self._sweep_timer = self._loop.call_later(self._timeout_s / _SWEEPS_PER_TIMEOUT, self._sweep)

    def _sweep(self) -> None:
        """Give up the connection when its oldest command was late at two sweeps in a row.

        Once alone proves nothing: after a stall of this process the reply may wait unread.
        """
        self._sweep_timer = None
        if not self._in_flight:
            return
        oldest, deadline_s = self._in_flight[0]
        if self._loop.time() <= deadline_s:
            self._overdue = None
        elif self._overdue is oldest:
            self._given_up_because = "the store does not answer in time (store.command_timeout_s)"
            self.abort()
            return
        else:
            self._overdue = oldest
        self._sweep_later()
