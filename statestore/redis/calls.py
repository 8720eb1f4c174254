"""Scripts, commands and transactions of a pool on its server."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError, ResponseError

from statestore.errors import StoreError, StoreUnavailableError
from statestore.redis.replies import MovedElsewhereError, ScriptMissingError, call_error
from statestore.redis.wire import Wire
from statestore.scripts import Script

Argument = bytes | str | int | float
Command = Sequence[Argument]

TestClock = Callable[[], int]
"""Milliseconds; replaces the server's clock, so that tests can drive two stores in lockstep."""

MAX_CONNECTIONS = 8
"""Calls of one ``ClientCalls`` under way at once; further ones wait for their turn."""


def pack(command: Command) -> bytes:
    """The command as it is sent."""
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # the stub knows tuples of one
    return packed


class Calls(ABC):
    """How a pool talks to its server.

    Every call raises:
        StoreUnavailableError: no connection, connection lost, or no answer in time.
        StoreError: the server refused it; see ``statestore.redis.replies``.
    """

    def __init__(
        self,
        connections: ConnectionPool,
        scripts: Mapping[str, Script],
        timeout_s: float,
        test_clock: TestClock | None = None,
    ) -> None:
        """``timeout_s`` is that of one call, once there is a connection."""
        self.connections = connections
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._test_clock = test_clock

    @abstractmethod
    def send(self, command: bytes) -> Awaitable[Any]:
        """Send a packed command; the awaitable gives the reply as the server sent it."""

    def command(self, *arguments: Argument) -> Awaitable[Any]:
        """Send a command; the awaitable gives the reply as the server sent it."""
        return self.send(pack(arguments))

    @abstractmethod
    async def together(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands as one transaction: nothing comes between them."""

    async def close(self) -> None:
        """Close every connection; calls in flight fail."""
        await self.connections.disconnect()

    async def script(self, name: str, base: bytes, *arguments: Argument) -> Any:
        """Run a script by its hash, or with its source where the server does not know it. ``base`` is what the keys of
        its pool begin with; ARGV[1] is put in front."""
        script = self._scripts[name]
        clock = "" if self._test_clock is None else self._test_clock()
        try:
            return await self.command("EVALSHA", script.sha, 1, base, clock, *arguments)
        except ScriptMissingError:
            await self.command("SCRIPT", "LOAD", script.source)  # so that it is never evicted
            # Scripts may be flushed again before the next call; the source works in any case.
            return await self.command("EVAL", script.source, 1, base, clock, *arguments)

    async def now_ms(self) -> int:
        """The store's time."""
        if self._test_clock is not None:
            return self._test_clock()
        seconds, microseconds = await self.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000


def transaction(commands: Sequence[Command]) -> list[bytes]:
    return [pack(command) for command in (("MULTI",), *commands, ("EXEC",))]


def results_of(replies: Sequence[Any]) -> list[Any]:
    """The results of a transaction; raises the first error among its replies."""
    results: list[Any] = replies[-1] if isinstance(replies[-1], list) else []
    for reply in (*replies, *results):
        if isinstance(reply, Exception):
            raise call_error(reply)
    return results


class ClientCalls(Calls):
    """Over redis-py: each call has a connection of its own, for processes that make few."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)

    async def send(self, command: bytes, timeout_s: float | None = None) -> Any:
        (reply,) = await self._run([command], timeout_s or self._timeout_s)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def command(self, *arguments: Argument, timeout_s: float | None = None) -> Awaitable[Any]:
        return self.send(pack(arguments), timeout_s)

    async def together(self, commands: Sequence[Command]) -> list[Any]:
        return results_of(await self._run(transaction(commands), self._timeout_s))

    async def _run(self, commands: Sequence[bytes], timeout_s: float) -> list[Any]:
        """What comes back for each; an error reply as a ``StoreError``."""
        async with self._turns:
            try:
                connection = await self.connections.get_connection()  # type: ignore[no-untyped-call]
                try:
                    async with asyncio.timeout(timeout_s):
                        await connection.send_packed_command(commands)
                        replies = [await _reply(connection) for _ in commands]
                finally:
                    await self.connections.release(connection)
            except (RedisError, OSError) as error:
                raise call_error(error) from error
            if any(isinstance(reply, MovedElsewhereError) for reply in replies):
                await self.connections.disconnect(inuse_connections=False)
            return replies


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return call_error(error)


class BatchedCalls(Calls):
    """Over one ``Wire`` at a time, made when needed, made again when lost, for processes with many calls at once: a
    batch costs the kernel and both sides one wake-up. One caller's attempt to connect serves all."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._closed = False

    def send(self, command: bytes) -> Awaitable[Any]:
        wire = self._wire
        return wire.send(command) if wire is not None and wire.takes_commands else self._send_when_ready(command)

    async def _send_when_ready(self, command: bytes) -> Any:
        wire = await self._ready()
        return await wire.send(command)

    async def together(self, commands: Sequence[Command]) -> list[Any]:
        wire = await self._ready()
        # In one piece: on a shared connection no other command may slip in, and no part may be left out.
        futures = [wire.send(command) for command in transaction(commands)]
        return results_of(await asyncio.gather(*futures, return_exceptions=True))

    async def _ready(self) -> Wire:
        wire = self._wire
        if wire is None or not wire.is_connected:
            if self._closed:
                raise StoreUnavailableError("the store was closed")
            if self._connecting is None:
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
                # Retrieved here, as all waiting callers may have given up by then.
                self._connecting.add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())
            # Shielded: a caller that gives up must not take the attempt from the others that wait for it.
            wire = await asyncio.shield(self._connecting)
        if not wire.has_room:
            raise StoreUnavailableError("the store is too far behind: too many calls wait for it")
        return wire

    async def _connect(self) -> Wire:
        try:
            self._wire = await Wire.open(self.connections, self._timeout_s)
            return self._wire
        finally:
            self._connecting = None

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                await self._connecting
        if self._wire is not None:
            self._wire.abort()
        await super().close()
