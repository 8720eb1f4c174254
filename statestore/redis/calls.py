"""Scripts and transactions over a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from statestore.connection import Connection
from statestore.errors import StoreError
from statestore.packing import Argument, pack
from statestore.replies import ScriptMissingError
from statestore.scripts import Script

TestClock = Callable[[], int]
"""Milliseconds; takes the place of the server's clock, so that tests and twins can be driven in lockstep."""


class Calls:
    """How a pool talks to its server."""

    def __init__(
        self, connection: Connection, scripts: Mapping[str, Script], test_clock: TestClock | None = None
    ) -> None:
        self.connection = connection
        self._scripts = scripts
        self._test_clock = test_clock

    async def script(self, name: str, keys: Sequence[bytes], *arguments: Argument) -> Any:
        """Run a script by its hash, or with its source where the server does not know it. ARGV[1] is put in front."""
        script = self._scripts[name]
        if script.key_count is not None and len(keys) != script.key_count:
            raise StoreError(f"script {name} takes {script.key_count} keys, not {len(keys)}")
        clock = "" if self._test_clock is None else self._test_clock()
        try:
            return await self.connection.command("EVALSHA", script.sha, len(keys), *keys, clock, *arguments)
        except ScriptMissingError:
            await self.connection.command("SCRIPT", "LOAD", script.source)  # so that it is never evicted
            # Whoever flushes scripts may do so again before the next call; the source needs nothing of the server.
            return await self.connection.command("EVAL", script.source, len(keys), *keys, clock, *arguments)

    async def command(self, *arguments: Argument) -> Any:
        return await self.connection.command(*arguments)

    async def together(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Run commands as one transaction: nothing comes between them."""
        wire = await self.connection.connect()
        # In one piece: on a shared connection nobody else's command may slip in, and no part may be left out.
        futures = wire.send_together([pack(arguments) for arguments in (("MULTI",), *commands, ("EXEC",))])
        replies: list[Any] = await asyncio.gather(*futures, return_exceptions=True)
        results = replies[-1] if isinstance(replies[-1], list) else []
        for reply in (*replies, *results):
            if isinstance(reply, BaseException):
                raise reply
        return results

    async def now_ms(self) -> int:
        """The store's time."""
        if self._test_clock is not None:
            return self._test_clock()
        seconds, microseconds = await self.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000
