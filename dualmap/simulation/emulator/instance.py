"""One emulated server: an engine, its paths and a port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dualmap.simulation.emulator.connection import Connections, HttpConnection, HttpRequest, Responder
from dualmap.simulation.emulator.endpoints import Endpoints
from dualmap.simulation.emulator.errors import bad_request
from dualmap.simulation.emulator.generator import Generator
from dualmap.simulation.emulator.kv_events import KvEventLog
from dualmap.simulation.emulator.served_names import ServedNames
from dualmap.simulation.emulator.settings import EmulatorSettings

if TYPE_CHECKING:
    from dualmap.simulation.emulator.kv_publisher import KvEventPublisher

PORT_CLOSES_AFTER_S = 0.2
"""A vLLM server whose engine died lingers this long."""
ORDER_ANSWERED_S = 0.02
"""The request for an abrupt death still gets its answer."""
_UNRANKED = frozenset({"/v1/responses", "/generative_scoring"})
"""Paths for which vLLM's server chooses the rank, whatever the header says."""
CLOSE_TIMEOUT_S = 2.0
"""Time for clients to read the end of their answers when the server closes."""


class EmulatedInstance:
    """Owns a listening socket and all its connections."""

    def __init__(self, settings: EmulatorSettings, port: int) -> None:
        ranks = range(settings.data_parallel_size)
        self.generators = [Generator(settings, crash=self._crash, rank=rank) for rank in ranks]
        """Generators by rank of data parallelism."""
        self.names = ServedNames(
            settings.served_model, settings.aliases, settings.loras, at_run_time=settings.runtime_loras
        )
        self._endpoints = [Endpoints(settings, each, self.generators, self.die, self.names) for each in self.generators]
        self._settings = settings
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections = Connections()
        self._timers: list[asyncio.TimerHandle] = []
        self._reopening: asyncio.Task[None] | None = None
        self.kv_events: list[KvEventPublisher] = []
        """Publishers by rank; none while nothing is published."""

    @property
    def generator(self) -> Generator:
        """The only one, or the first."""
        return self.generators[0]

    @property
    def endpoints(self) -> Endpoints:
        """Endpoints of the first engine."""
        return self._endpoints[0]

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
            for rank, generator in enumerate(self.generators):
                publisher = self._publisher(offset, rank)
                self.kv_events.append(publisher)
                generator.publish_cache(KvEventLog(generator.config, publisher))

    def _publisher(self, offset: int, rank: int) -> KvEventPublisher:
        """The publisher of an instance that ``vllm serve`` started with these endpoints: each rank adds its number to
        the ports."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        endpoint, replay_endpoint = (f"tcp://{host}:{self._port + ports + rank}" for ports in (offset, 2 * offset))
        from dualmap.simulation.emulator.kv_publisher import (
            KvEventPublisher,  # with ZeroMQ, loaded only where it is used
        )

        topic = f"kv@{host}:{self._port}@{self._settings.served_model}"
        return KvEventPublisher(endpoint, replay_endpoint, topic, rank=rank)

    def die(self, abruptly: bool, revive_after_s: float | None) -> None:
        """Go down: abruptly, as when the process is killed, or as when only the engine dies.

        With ``revive_after_s``, the server comes back on its port after that time, with an empty cache. Of deaths that
        follow each other the last one says when: the return of a former one would take requests from a live engine.
        """
        loop = asyncio.get_running_loop()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if abruptly:
            self._timers.append(loop.call_later(ORDER_ANSWERED_S, self._drop_port))
            self._timers.append(loop.call_later(ORDER_ANSWERED_S, self._kill))
        else:
            self._kill()
            self._timers.append(loop.call_later(PORT_CLOSES_AFTER_S, self._drop_port))
        if revive_after_s is not None:
            self._timers.append(loop.call_later(PORT_CLOSES_AFTER_S + revive_after_s, self._revive))

    async def shut_down(self) -> None:
        """Shut down as SIGTERM does: let running requests finish if there is time for that, abort the rest, close."""
        for endpoints in self._endpoints:
            endpoints.faults.draining = True
        await asyncio.gather(*(each.wait_idle(self._settings.shutdown_timeout_s) for each in self.generators))
        await self.close()

    async def close(self) -> None:
        """Abort what is running, close the port and every connection."""
        for timer in self._timers:
            timer.cancel()
        if self._reopening is not None:
            self._reopening.cancel()
        for generator in self.generators:
            generator.abort_all()
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.generator.kv_legs.close()
        await self._connections.close(CLOSE_TIMEOUT_S)
        await self._close_events()

    async def _close_events(self) -> None:
        while self.kv_events:
            await self.kv_events.pop().close()

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._handle, self._connections)

    def _handle(self, request: HttpRequest, responder: Responder) -> None:
        """Handle a request by the engine that it names, else by the one with the fewest requests."""
        named, count = request.headers.get("x-data-parallel-rank"), len(self.generators)
        rank = None if named is None or request.path in _UNRANKED else _number(named)
        if rank is None:
            rank = min(range(count), key=lambda each: self.generators[each].active)
        elif not 0 <= rank < count:
            wrong = bad_request(f"data_parallel_rank {named} is out of range [0, {count}).")
            return responder.send(wrong.status, wrong.body())
        return self._endpoints[rank].handle(request, responder)

    def _crash(self) -> None:
        self.die(abruptly=False, revive_after_s=None)

    def _kill(self) -> None:
        for generator in self.generators:
            generator.kill()

    def _drop_port(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._connections.abort()

    def _revive(self) -> None:
        for generator in self.generators:
            generator.restart()
        self.names.restart()
        self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        await self._close_events()
        await self.open()


def _number(text: str) -> int | None:
    """The number that a field names; what is none is ignored, as vLLM does."""
    try:
        return int(text)
    except ValueError:
        return None
