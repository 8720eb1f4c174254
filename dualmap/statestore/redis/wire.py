"""Commands and transactions over a connection to a Redis server, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import hiredis
from redis.asyncio import ConnectionPool

from dualmap.statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.pool.calls import Argument, Calls, Command
from dualmap.statestore.pool.replies import (
    ForbiddenError,
    MovedElsewhereError,
    NoFunctionsError,
    ScriptMissingError,
    TooLateError,
    reply_error,
)
from dualmap.statestore.pool.scripts import LIBRARY_PREFIX, Scripts, own_clock_word
from dualmap.statestore.redis.server_clock import ServerClock
from dualmap.statestore.redis.subscriber import Subscriber

MAX_IN_FLIGHT = 16_384
"""Unanswered commands at which no more are sent; a server so far behind counts as unavailable."""
MOST_LIBRARIES = 8
"""Libraries of other versions and settings beside which a new one is loaded; beyond that they are dropped."""
_SWEEPS_PER_TIMEOUT = 4
_NO_REPLY_YET = object()
_log = logging.getLogger(__name__)

OwnClock = Callable[[], int]
"""Milliseconds; replaces the server's clock, so that stores can be driven in lockstep."""

pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # the stub knows no such
"""A command as it is sent."""


_MULTI: Final = pack(("MULTI",))
_EXEC: Final = pack(("EXEC",))


class Wire(asyncio.Protocol):
    """One connection to a Redis server, from ``open`` until it is lost: commands out in batches, replies back in order.

    Commands of all callers within one iteration of the event loop leave in one write, so a busy replica pays for the
    kernel and the server's wake-up once per batch. A command that finds none under way is sent at once: an idle server
    need not wait for the next iteration. Replies are matched by order, as RESP prescribes. There is no timer per
    command: a sweep checks only the oldest one, as no younger reply can overtake it.
    """

    def __init__(self, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._writer = writer
        """Kept, since the writer closes the connection when it is collected."""
        self._transport: asyncio.WriteTransport | None = writer.transport
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(replyError=reply_error, notEnoughData=_NO_REPLY_YET)
        self._outgoing: list[bytes] = []
        self._in_flight: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[Any] | None = None
        self._ended_because = "the connection to the store was lost"
        self.is_connected = True

    @classmethod
    async def open(cls, connections: ConnectionPool, timeout_s: float) -> Wire:
        """Open a wire on a connection that redis-py has made, secured and greeted: its transport is taken over.

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
    def has_room(self) -> bool:
        """Whether it is connected, and not too far behind."""
        return self.is_connected and len(self._in_flight) < MAX_IN_FLIGHT

    # commands ----------------------------------------------------------------------------------------------
    def send(self, command: bytes, timeout_s: float | None = None) -> asyncio.Future[Any]:
        """Send a packed command, at once or with the others of its iteration; the future gets its reply or a
        ``StoreError``. ``timeout_s`` is that of the connection unless given."""
        future, in_flight = self._loop.create_future(), self._in_flight
        if self._transport is None:
            future.set_exception(StoreUnavailableError(self._ended_because))
            return future
        if not in_flight:
            self._transport.write(command)
        else:
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            self._outgoing.append(command)
        # Entries are in the order of the bytes: replies carry no id, so only the place in this queue matches them.
        in_flight.append((future, self._time() + (timeout_s or self._timeout_s)))
        if self._sweep_timer is None:
            self._sweep_later()
        return future

    def send_together(self, commands: Sequence[bytes]) -> list[asyncio.Future[Any]]:
        """Send packed commands in one piece; the futures get their replies, or one of them that they cannot be sent."""
        futures = [self.send(b"".join(commands))]
        if self._transport is not None:
            _, deadline_s = self._in_flight[-1]
            futures += [self._loop.create_future() for _ in commands[1:]]
            self._in_flight.extend([(future, deadline_s) for future in futures[1:]])
        return futures

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
        reader, in_flight = self._reader, self._in_flight
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NO_REPLY_YET:
                # The entry is removed even if its caller gave up: the reply comes all the same, and must not answer the
                # next command.
                future, _ = in_flight.popleft()
                if isinstance(reply, Exception):
                    self._refuse(future, reply)
                elif not future.done():
                    future.set_result(reply)
        except (hiredis.ProtocolError, IndexError):  # or a reply without a command
            self.abort()

    def _refuse(self, future: asyncio.Future[Any], error: Exception) -> None:
        # The pool is at another server: this connection would refuse every further call, so the next one connects
        # again.
        if isinstance(error, MovedElsewhereError):
            self.abort()
        if not future.done():
            future.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self.is_connected = None, False
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


class WireCalls(Calls):
    """Calls over one ``Wire`` at a time, made when needed and made again when lost. A batch costs the kernel and both
    processes one wake-up. One caller's attempt to connect serves all."""

    def __init__(
        self,
        connections: ConnectionPool,
        scripts: Scripts,
        timeout_s: float,
        own_clock: OwnClock | None = None,
    ) -> None:
        """``timeout_s`` is that of one call, once there is a connection."""
        self.connections = connections
        self._scripts = scripts
        self._own_clock = own_clock
        self._timeout_s = timeout_s
        self._server_clock = ServerClock()
        """Clock of the server of the present connection."""
        self._has_functions = True
        """Whether that server has functions, as far as is known."""
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._subscriber = Subscriber(connections)
        self._closed = False

    def another(self) -> Calls:
        return WireCalls(self.connections, self._scripts, self._timeout_s, self._own_clock)

    def command(self, *arguments: Argument, timeout_s: float | None = None) -> Awaitable[Any]:
        return self._send(pack(arguments), timeout_s)

    def _send(self, command: bytes, timeout_s: float | None = None) -> Awaitable[Any]:
        wire = self._wire
        if wire is not None and wire.has_room:
            return wire.send(command, timeout_s)
        return self._send_when_ready(command, timeout_s)

    async def script(self, name: str, base: bytes, *arguments: Argument) -> Any:
        """Run a script as a function of the library, which is loaded where the server does not know it; where it has no
        functions, by its hash, or with its source.

        It carries the time of the server's clock at which this call is given up: that of the last reply which contained
        the time, and what has passed here since. No clock of this machine enters. A refusal before that moment shows
        that the server's clock was set, or that another server answers: the refusal has the time, and the script is
        sent again.
        """
        # One deadline for both tries: the store refuses a script after it, so a call that was given up changes nothing
        # later.
        script, loop_s = self._scripts.by_name[name], asyncio.get_running_loop().time
        give_up_s = loop_s() + self._timeout_s
        verb, body = ("FCALL", script.function) if self._has_functions else ("EVALSHA", script.sha)
        tried_again = loaded = False
        while True:
            if self._own_clock is not None:
                act_by = own_clock_word(self._own_clock())
            else:
                wire = self._wire
                if wire is None or not wire.is_connected or not self._server_clock.is_known:
                    await self.now_ms()
                act_by = b"%d" % self._server_clock.time_ms(give_up_s)
            try:
                return await self._send(pack((verb, body, 1, base, act_by, *arguments)))
            except (NoFunctionsError, StoreConfigurationError) as error:
                if verb != "FCALL":
                    if isinstance(error, ForbiddenError):
                        raise error.about(base) from error
                    raise
                # Or this user may not call any: then it may run scripts, or is told why not.
                self._has_functions = False
                verb, body = "EVALSHA", script.sha
            except ScriptMissingError:
                if verb == "FCALL" and not loaded and await self._load_library():
                    loaded = True  # functions may be flushed again before the next call: then it is a script
                    continue
                await self.command("SCRIPT", "LOAD", script.source)  # so that it is never evicted
                # Scripts may be flushed again before the next call; the source works in any case.
                verb, body = "EVAL", script.source
            except TooLateError as error:
                self._server_clock.set(error.now_ms, loop_s())
                if tried_again or loop_s() >= give_up_s:
                    raise
                tried_again = True

    async def _load_library(self) -> bool:
        """Load the library, unless another process was faster; False where this server or user may not."""
        try:
            await self.command("FUNCTION", "LOAD", self._scripts.library)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            if "already exists" in str(error):
                return True
            _log.info("scripts are sent in place of functions: %s", error)
            self._has_functions = False
            return False
        await self._drop_libraries()
        return True

    async def _drop_libraries(self) -> None:
        """Drop the libraries of other versions and settings where many have gathered. A process that still uses one
        loads it again."""
        with contextlib.suppress(StoreError):
            listed = await self.command("FUNCTION", "LIST", "LIBRARYNAME", f"{LIBRARY_PREFIX}*")
            names = [dict(zip(each[::2], each[1::2], strict=True))[b"library_name"].decode() for each in listed]
            if len(names) > MOST_LIBRARIES:
                for name in names:
                    if name != self._scripts.library_name:
                        await self.command("FUNCTION", "DELETE", name)

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()

    async def now_ms(self) -> int:
        if self._own_clock is not None:
            return self._own_clock()
        sent_s = self._loop_s()
        seconds, microseconds = await self.command("TIME")
        now_ms = int(seconds) * 1000 + int(microseconds) // 1000
        self._server_clock.observe(now_ms, sent_s, self._loop_s())
        return now_ms

    async def together(self, commands: Sequence[Command]) -> list[Any]:
        wire = await self._ready()
        # The transaction is sent in one piece: on a shared connection no other command may slip in, and no part may be
        # left out.
        futures = wire.send_together([_MULTI, *[pack(tuple(command)) for command in commands], _EXEC])
        try:
            await futures[-1]
        except asyncio.CancelledError:
            for future in futures:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # retrieved: else asyncio logs it
            raise
        except StoreError:
            pass  # a refusal of a single command comes before, and says more
        # Replies come in the order of the commands, so all are there.
        replies = [future.exception() or future.result() for future in futures]
        results: list[Any] = replies[-1] if isinstance(replies[-1], list) else []
        for reply in (*replies, *results):
            if isinstance(reply, BaseException):
                raise reply
        return results

    async def _send_when_ready(self, command: bytes, timeout_s: float | None) -> Any:
        wire = await self._ready()
        return await wire.send(command, timeout_s)

    async def _ready(self) -> Wire:
        wire = self._wire
        if wire is None or not wire.is_connected:
            if self._closed:
                raise StoreUnavailableError("the store was closed")
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
                # The exception is retrieved here, as all waiting callers may have given up by then.
                self._connecting.add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())
            # The attempt is shielded: a caller that gives up must not take it from the others that wait for it.
            wire = await asyncio.shield(self._connecting)
        if wire.is_connected and not wire.has_room:
            raise StoreUnavailableError("the store is too far behind: too many calls wait for it")
        return wire

    async def _connect(self) -> Wire:
        try:
            self._wire = await Wire.open(self.connections, self._timeout_s)
            self._server_clock, self._has_functions = ServerClock(), True  # it may be another server
            return self._wire
        finally:
            self._connecting = None

    def listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        self._subscriber.listen(channel, deliver)

    def hang_up(self) -> None:
        if self._wire is not None:
            self._wire.abort()

    async def close(self) -> None:
        self._closed = True
        await self._subscriber.close()
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                await self._connecting
        self.hang_up()
        await self.connections.disconnect()
