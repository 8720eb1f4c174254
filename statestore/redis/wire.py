"""One connection to a Redis server: commands out in batches, replies back in order.

Commands of all callers within one turn of the event loop leave in one write, so a busy replica pays for the kernel and
the server's wake-up once per batch. A command that finds none under way is sent at once: an idle server need not wait
for the next turn. Replies are matched by order, as RESP prescribes. There is no timer per command: a sweep checks only
the oldest one, as no younger reply can overtake it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool

from statestore.errors import StoreUnavailableError
from statestore.redis.replies import MovedElsewhereError, reply_error

MAX_IN_FLIGHT = 16_384
"""Unanswered commands at which no more are sent; a server so far behind counts as unavailable."""
_SWEEPS_PER_TIMEOUT = 4
_NO_REPLY_YET = object()


class Wire(asyncio.Protocol):
    """A connection from ``open`` until it is lost; never reused."""

    def __init__(self, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = writer
        """Kept, as it closes the connection when it is collected."""
        self._transport: asyncio.WriteTransport | None = writer.transport
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(replyError=reply_error, notEnoughData=_NO_REPLY_YET)
        self._outgoing: list[bytes] = []
        self._in_flight: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[Any] | None = None
        self._ended_because = "the connection to the store was lost"

    @classmethod
    async def open(cls, connections: ConnectionPool, timeout_s: float) -> Wire:
        """On a connection that redis-py has made, secured and greeted: its transport is taken over.

        Raises:
            StoreUnavailableError, StoreConfigurationError: it cannot be made.
        """
        connection: Any = connections.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()
        reader, writer = connection._reader, connection._writer
        connection._reader = connection._writer = None
        wire = cls(writer, timeout_s)
        writer.transport.set_protocol(wire)
        if reader.at_eof():  # it ended just now, and only redis-py's reader noticed
            wire.abort()
            wire.connection_lost(None)
        return wire

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < MAX_IN_FLIGHT

    @property
    def takes_commands(self) -> bool:
        return self._transport is not None and len(self._in_flight) < MAX_IN_FLIGHT

    # commands ----------------------------------------------------------------------------------------------
    def send(self, command: bytes, timeout_s: float | None = None) -> asyncio.Future[Any]:
        """Send a packed command, at once or with the others of its turn; the future gets its reply or a
        ``StoreError``. ``timeout_s`` is that of the connection unless given."""
        future = self._loop.create_future()
        if self._transport is None:
            future.set_exception(StoreUnavailableError(self._ended_because))
            return future
        if not self._in_flight and not self._outgoing:
            self._transport.write(command)
        else:
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            self._outgoing.append(command)
        self._in_flight.append((future, self._loop.time() + (timeout_s or self._timeout_s)))
        if self._sweep_timer is None:
            self._sweep_later()
        return future

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))

    def abort(self) -> None:
        """Drop the connection now; calls in flight fail."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol --------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NO_REPLY_YET:
                self._accept(reply)
        except hiredis.ProtocolError:
            self.abort()

    def _accept(self, reply: Any) -> None:
        if not self._in_flight:  # a reply without a command
            self.abort()
            return
        future, _ = self._in_flight.popleft()
        if isinstance(reply, MovedElsewhereError):
            self.abort()
        if future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        if exc is not None:
            self._ended_because += f": {exc}"
        while self._in_flight:
            future, _ = self._in_flight.popleft()
            if not future.done():
                future.set_exception(StoreUnavailableError(self._ended_because))

    # timeouts ----------------------------------------------------------------------------------------------
    def _sweep_later(self) -> None:
        self._sweep_timer = self._loop.call_later(self._timeout_s / _SWEEPS_PER_TIMEOUT, self._sweep)

    def _sweep(self) -> None:
        """Give up the connection when its oldest command was late at two sweeps in a row.

        Once proves nothing: after a stall of this process the reply may wait unread.
        """
        self._sweep_timer = None
        if not self._in_flight:
            return
        oldest, deadline_s = self._in_flight[0]
        if self._loop.time() <= deadline_s:
            self._overdue = None
        elif self._overdue is oldest:
            self._ended_because = "the store does not answer in time (store.command_timeout_s)"
            self.abort()
            return
        else:
            self._overdue = oldest
        self._sweep_later()
