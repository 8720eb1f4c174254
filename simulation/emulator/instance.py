"""One emulated server: an engine, its paths and a port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from simulation.emulator.connection import Connections, HttpConnection
from simulation.emulator.endpoints import Endpoints
from simulation.emulator.generator import Generator
from simulation.emulator.kv_events import KvEventLog
from simulation.settings import EmulatorSettings

if TYPE_CHECKING:
    from simulation.emulator.kv_publisher import KvEventPublisher

PORT_CLOSES_AFTER_S = 0.2
"""A vLLM server whose engine died lingers this long."""
ORDER_ANSWERED_S = 0.02
"""The request for an abrupt death still gets its answer."""
CLOSE_TIMEOUT_S = 2.0
"""Time for clients to read the end of their answers when the server closes."""


class EmulatedInstance:
    """Owns a listening socket and all its connections."""

    def __init__(self, settings: EmulatorSettings, port: int) -> None:
        self.generator = Generator(settings, crash=lambda: self.die(abruptly=False, revive_after_s=None))
        self.endpoints = Endpoints(settings, self.generator, self.die)
        self._settings = settings
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections = Connections()
        self._timers: list[asyncio.TimerHandle] = []
        self._reopening: asyncio.Task[None] | None = None
        self.kv_events: KvEventPublisher | None = None

    @property
    def url(self) -> str:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"http://{host}:{self._port}"

    async def open(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, self._settings.host, self._port, backlog=1024)
        self._port = self._server.sockets[0].getsockname()[1]
        self.generator.kv_legs.host, self.generator.kv_legs.port = self._settings.host, self._port
        offset = self._settings.kv_events_port_offset
        if offset is not None:
            self.kv_events = self._publisher(offset)
            self.generator.publish_cache(KvEventLog(self.generator.config.block_tokens, self.kv_events))

    def _publisher(self, offset: int) -> KvEventPublisher:
        """As an instance started by ``vllm serve`` with these endpoints."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        endpoint, replay_endpoint = (f"tcp://{host}:{self._port + ports}" for ports in (offset, 2 * offset))
        from simulation.emulator.kv_publisher import KvEventPublisher  # with ZeroMQ, loaded only where it is used

        topic = f"kv@{host}:{self._port}@{self._settings.served_model}"
        return KvEventPublisher(endpoint, replay_endpoint, topic)

    def die(self, abruptly: bool, revive_after_s: float | None) -> None:
        """Go down: abruptly, as when the process is killed, or as when only the engine dies.

        With ``revive_after_s``, the server comes back on its port after that time, with an empty cache.
        """
        loop = asyncio.get_running_loop()
        if abruptly:
            self._timers.append(loop.call_later(ORDER_ANSWERED_S, self._drop_port))
            self._timers.append(loop.call_later(ORDER_ANSWERED_S, self.generator.kill))
        else:
            self.generator.kill()
            self._timers.append(loop.call_later(PORT_CLOSES_AFTER_S, self._drop_port))
        if revive_after_s is not None:
            self._timers.append(loop.call_later(PORT_CLOSES_AFTER_S + revive_after_s, self._revive))

    async def shut_down(self) -> None:
        """What SIGTERM does: let running requests finish if there is time for that, abort the rest, close."""
        self.endpoints.faults.draining = True
        await self.generator.wait_idle(self._settings.shutdown_timeout_s)
        await self.close()

    async def close(self) -> None:
        """Abort what is running, close the port and every connection."""
        for timer in self._timers:
            timer.cancel()
        if self._reopening is not None:
            self._reopening.cancel()
        self.generator.abort_all()
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.generator.kv_legs.close()
        await self._connections.close(CLOSE_TIMEOUT_S)
        if self.kv_events is not None:
            await self.kv_events.close()

    def _connection(self) -> HttpConnection:
        return HttpConnection(self.endpoints.handle, self._connections)

    def _drop_port(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._connections.abort()

    def _revive(self) -> None:
        self.generator.restart()
        self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        if self.kv_events is not None:
            await self.kv_events.close()
        await self.open()
