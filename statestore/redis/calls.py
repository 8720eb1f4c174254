"""Scripts, commands and transactions of a pool on its server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool

from statestore.errors import StoreError, StoreUnavailableError
from statestore.redis.replies import ScriptMissingError
from statestore.redis.scripts import Script
from statestore.redis.wire import Wire

Argument = bytes | str | int | float
Command = Sequence[Argument]

TestClock = Callable[[], int]
"""Milliseconds; replaces the server's clock, so that tests can drive two stores in lockstep."""


def pack(command: Command) -> bytes:
    """The command as it is sent."""
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # the stub knows tuples of one
    return packed


class Calls:
    """How a pool talks to its server: over one ``Wire`` at a time, made when needed, made again when lost, where a
    batch costs the kernel and both sides one wake-up. One caller's attempt to connect serves all.

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
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._closed = False

    def another(self) -> Calls:
        """The same over another connection."""
        return Calls(self.connections, self._scripts, self._timeout_s, self._test_clock)

    def command(self, *arguments: Argument, timeout_s: float | None = None) -> Awaitable[Any]:
        """Send a command; the awaitable gives the reply as the server sent it. ``timeout_s`` is for one that waits at
        the server: it needs ``Calls`` of its own, as those behind it wait too."""
        wire, command = self._wire, pack(arguments)
        if wire is not None and wire.takes_commands:
            return wire.send(command, timeout_s)
        return self._send_when_ready(command, timeout_s)

    async def together(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands as one transaction: nothing comes between them."""
        wire = await self._ready()
        # In one piece: on a shared connection no other command may slip in, and no part may be left out.
        futures = [wire.send(pack(command)) for command in (("MULTI",), *commands, ("EXEC",))]
        replies = await asyncio.gather(*futures, return_exceptions=True)
        results: list[Any] = replies[-1] if isinstance(replies[-1], list) else []
        for reply in (*replies, *results):
            if isinstance(reply, BaseException):
                raise reply
        return results

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

    def hang_up(self) -> None:
        """Drop the connection; calls in flight fail, and the next one connects again."""
        if self._wire is not None:
            self._wire.abort()

    async def close(self) -> None:
        """Close the connection for good; calls in flight fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StoreError):
                await self._connecting
        self.hang_up()
        await self.connections.disconnect()
