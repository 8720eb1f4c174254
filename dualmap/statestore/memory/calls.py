"""Calls of a pool to a server within this process: nothing waits but the one call that is meant to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dualmap.statestore.memory.server import MemoryServer
from dualmap.statestore.pool.calls import Argument, Calls, Command
from dualmap.statestore.pool.scripts import Scripts, own_clock_word


class MemoryCalls(Calls):
    """Commands have their replies when they return, but BZPOPMIN."""

    def __init__(self, server: MemoryServer, scripts: Scripts, now_ms: Callable[[], int]) -> None:
        self._server = server
        self._scripts = scripts
        self._now_ms = now_ms
        server.load_functions(scripts.library)

    def another(self) -> Calls:
        return self

    async def command(self, *arguments: Argument, timeout_s: float | None = None) -> Any:
        if arguments[0] == "BZPOPMIN":
            return await self._pop_when_there(_words(arguments)[1], float(arguments[2]))
        reply = self._server.run(*_words(arguments))
        self._server.deliver()
        return reply

    async def script(self, name: str, base: bytes, *arguments: Argument) -> Any:
        words = [own_clock_word(self._now_ms()), *_words(arguments)]
        reply = self._server.run_function(self._scripts.by_name[name].function, base, words)
        self._server.deliver()
        return reply

    async def now_ms(self) -> int:
        return self._now_ms()

    async def together(self, commands: Sequence[Command]) -> list[Any]:
        replies = [self._server.run(*_words(command)) for command in commands]
        self._server.deliver()
        return replies

    async def _pop_when_there(self, key: bytes, timeout_s: float) -> list[bytes] | None:
        try:
            async with asyncio.timeout(timeout_s):
                while not (popped := self._server.do_zpopmin(key)):
                    await self._server.added(key)
        except TimeoutError:
            return None
        return [key, *popped]

    def listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        self._server.listen(channel, deliver)

    def hang_up(self) -> None:
        """A call within the process is never under way."""

    async def close(self) -> None:
        """Nothing is open."""


def _words(command: Command) -> Sequence[bytes]:
    """The words of a command, as redis-py sends them."""
    return [each if type(each) is bytes else str(each).encode() for each in command]
