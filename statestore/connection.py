"""A connection that heals: one ``Wire`` at a time, made when needed, made anew when lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

from scheduling.backoff import backoff_s
from statestore.endpoint import Endpoint
from statestore.errors import StoreError, StoreUnavailableError
from statestore.handshake import connect
from statestore.packing import Argument, pack
from statestore.wire import PushHandler, Wire

Resolve = Callable[[], Awaitable[Endpoint]]
"""Where the pool's server is at this moment; asked before every attempt to connect."""

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class Connection:
    """Commands to wherever ``resolve`` points.

    While the server is away, one caller's attempt to connect serves all; between attempts, which back off up to
    a second, calls fail at once with the last cause. With ``keep`` the connection is restored without a caller.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        connect_timeout_s: float,
        command_timeout_s: float,
        on_push: PushHandler | None = None,
        on_connected: Callable[[], None] | None = None,
        keep: bool = False,
    ) -> None:
        self._resolve = resolve
        self._connect_timeout_s = connect_timeout_s
        self._command_timeout_s = command_timeout_s
        self._on_push = on_push
        self._on_connected = on_connected
        self._keep = keep
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failures = 0
        """Attempts to connect that failed in a row."""
        self._pause_s = 0.0
        self._retry_at_s = 0.0
        self._last_error: StoreError | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._wire is not None

    def command(self, *arguments: Argument, timeout_s: float | None = None) -> Awaitable[Any]:
        """Send a command; the awaitable gives the reply.

        Raises:
            StoreUnavailableError: no connection, connection lost, or no answer in time.
            StoreError: the server refused the command; see ``statestore.replies``.
        """
        return self.send(pack(arguments), timeout_s)

    def send(self, command: bytes, timeout_s: float | None = None) -> Awaitable[Any]:
        """``command`` for what is packed already."""
        wire = self._wire
        if wire is not None:
            return wire.send(command, timeout_s)
        return self._send_once_connected(command, timeout_s)

    async def _send_once_connected(self, command: bytes, timeout_s: float | None) -> Any:
        wire = await self.connect()
        return await wire.send(command, timeout_s)

    async def connect(self) -> Wire:
        """The connection, made now if there is none.

        Raises:
            StoreUnavailableError, StoreConfigurationError: it cannot be made.
        """
        if self._wire is not None:
            return self._wire
        if self._closed:
            raise StoreUnavailableError("the store was closed")
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            if loop.time() < self._retry_at_s and self._last_error is not None:
                raise type(self._last_error)(str(self._last_error)) from self._last_error
            self._connecting = loop.create_task(self._connect())
            # Seen here, as all who waited may have given up by then.
            self._connecting.add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())
        # Shielded: a caller that gives up must not take the attempt from the others that wait for it.
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                endpoint = await self._resolve()
                wire = await connect(endpoint, self._command_timeout_s, on_lost=self._lost, on_push=self._on_push)
        except StoreError as error:
            self._back_off(error)
            raise
        except TimeoutError as error:
            unavailable = StoreUnavailableError(
                f"cannot connect to the store: no answer within {self._connect_timeout_s:g} s"
            )
            self._back_off(unavailable)
            raise unavailable from error
        finally:
            self._connecting = None
        self._failures = 0
        self._last_error = None
        self._wire = wire
        if self._on_connected is not None:
            loop.call_soon(self._on_connected)
        return wire

    def _back_off(self, error: StoreError) -> None:
        self._last_error = error
        self._failures += 1
        self._pause_s = backoff_s(self._failures, first_s=_FIRST_BACKOFF_S, longest_s=_MAX_BACKOFF_S)
        # Spread, so that a fleet of replicas does not return to a restarted server in one instant.
        self._retry_at_s = asyncio.get_running_loop().time() + self._pause_s * random.uniform(0.5, 1.0)

    def _lost(self, wire: Wire) -> None:
        if self._wire is not wire:
            return
        self._wire = None
        if self._keep and not self._closed:
            self._keeper = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while not self._closed and self._wire is None:
            with contextlib.suppress(StoreError):
                await self.connect()
                return
            await asyncio.sleep(self._pause_s)

    def drop(self) -> None:
        """Abort the present connection; the next command makes a new one."""
        if self._wire is not None:
            self._wire.abort()

    async def close(self) -> None:
        """Close for good; calls in flight fail."""
        self._closed = True
        for task in (self._keeper, self._connecting):
            if task is not None and not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, StoreError):
                    await task
        self.drop()
