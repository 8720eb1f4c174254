"""Notifies a service manager such as systemd that this process serves, and repeatedly that its event loop runs.

A manager with a watchdog kills a process that stops notifying. Otherwise a replica that hangs would receive connections
on a shared port for as long as it hangs. The protocol is that of sd_notify(3): a datagram to $NOTIFY_SOCKET.
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
    """The service manager that the environment names; if it names none, nothing is sent."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A name that begins with @ is not in the file system; a socket of another kind is not supported.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._watch_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if ours and address else 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Notify that the event loop runs, for the time of the context, if the manager has a watchdog."""
        notifying = asyncio.create_task(self._notify_alive(), name="watchdog") if self._watch_s > 0 else None
        try:
            yield
        finally:
            if notifying is not None:
                notifying.cancel()
                await asyncio.gather(notifying, return_exceptions=True)

    def ready(self) -> None:
        """Notify that this process serves."""
        self._notify(_READY)

    async def _notify_alive(self) -> None:
        while True:
            self._notify(_ALIVE)
            await asyncio.sleep(self._watch_s / _TELLS_PER_WATCH)

    def _notify(self, state: bytes) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(state, self._address)
        except OSError as error:
            log.warning("the service manager could not be notified of %s: %s", state.decode(), error)
