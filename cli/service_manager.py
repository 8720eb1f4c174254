"""A service manager such as systemd is told that this process serves, and again and again that its event loop runs.

A manager with a watchdog kills a process that falls silent. Without that, a replica that hangs would catch connections
on a port it shares for as long as it hangs. The protocol is that of sd_notify(3): a datagram to $NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping

log = logging.getLogger(__name__)

_READY, _ALIVE = b"READY=1", b"WATCHDOG=1"
_TELLS_PER_WATCH = 3


class ServiceManager:
    """Who started this process, as far as the environment names it; else nobody, and nothing is told."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is none in the file system; a socket of another kind is not for us.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watch_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if ours and address else 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Tell that the event loop runs, for the time of the context, if the manager wants to know."""
        telling = asyncio.create_task(self._tell_alive(), name="watchdog") if self._watch_s > 0 else None
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)

    def ready(self) -> None:
        """Tell that this process serves."""
        self._tell(_READY)

    async def _tell_alive(self) -> None:
        while True:
            self._tell(_ALIVE)
            await asyncio.sleep(self._watch_s / _TELLS_PER_WATCH)

    def _tell(self, state: bytes) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(state, self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", state.decode(), error)
