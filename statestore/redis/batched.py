"""Calls of one process over one connection, batched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any

from statestore.errors import StoreError, StoreUnavailableError
from statestore.redis.calls import Calls, results_of, transaction
from statestore.redis.packing import Command
from statestore.redis.wire import Wire


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
