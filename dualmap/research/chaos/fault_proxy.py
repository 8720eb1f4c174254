"""A TCP proxy in front of one server, which can break the network between that server and its clients.

A fault says what happens to the connections that are open when it begins, and to those that are made while it lasts. It
may concern the connections of some clients alone. Without a fault every byte passes, and the proxy is as transparent as
it can be: where nothing listens at the server's port, nothing listens at the proxy's either, and both refuse a client
alike.

What a proxy on one machine cannot do: drop the packets that make a connection. A connection to a machine that is gone
is made here, and stays silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum

HOST = "127.0.0.1"
_CHUNK_BYTES = 65_536
_LOOK_EVERY_S = 0.02
_IN_ORDER_S = 1e-6
"""The event loop keeps no order among what is due at the same time."""
_NO_LINGER = struct.pack("ii", 1, 0)
_GARBAGE_BYTES = 64


class Treatment(StrEnum):
    """The effect of a fault on a connection."""

    PASS = "pass"
    HOLD = "hold"
    """No byte passes while the fault lasts, in either direction; afterwards the bytes arrive, late."""
    MUTE = "mute"
    """Half open: what the client sends arrives, and what the server answers does not while the fault lasts."""
    CLOSE = "close"
    """The connection ends; a new one is refused, or ends at once where only some clients are concerned."""
    RESET = "reset"
    """The connection is reset (RST), a new one after it was accepted."""
    GARBAGE = "garbage"
    """The server's next bytes arrive as others that mean nothing, and the connection ends."""


@dataclass(frozen=True, slots=True)
class NetworkFault:
    """A fault of the network."""

    open: Treatment = Treatment.PASS
    """To connections that are open when the fault begins."""
    new: Treatment = Treatment.PASS
    """To connections that are made while it lasts."""
    delay_s: float = 0.0
    """Every byte is so much later, in both directions."""
    bytes_per_s: float | None = None
    """Throughput of each direction of a connection; None: no limit."""


CUT = NetworkFault(Treatment.CLOSE, Treatment.CLOSE)
RESET = NetworkFault(Treatment.RESET, Treatment.RESET)
BLACK_HOLE = NetworkFault(Treatment.HOLD, Treatment.HOLD)
HALF_OPEN = NetworkFault(Treatment.MUTE, Treatment.MUTE)
LEFT_OPEN = NetworkFault(Treatment.HOLD, Treatment.CLOSE)
"""Open connections stay open and silent; new ones are refused."""
GARBAGE = NetworkFault(Treatment.GARBAGE, Treatment.GARBAGE)
_NO_FAULT = NetworkFault()

Concerns = Callable[[int, int], bool]
"""Whether a fault concerns a connection, by the client's port and the proxy's."""


class FaultProxy:
    """One listening port in front of ``target_port`` of this machine. Use it within one event loop.

    Args:
        tls: the proxy speaks TLS to its clients, and the plain protocol to the server.
    """

    def __init__(self, target_port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.target_port = target_port
        self.port = 0
        """The proxy's own; the same for as long as the proxy lives."""
        self._tls = tls
        self._fault = _NO_FAULT
        self._concerns: Concerns | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._mirror: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Listen."""
        await self._listen()

    async def close(self) -> None:
        """Close the port and every connection."""
        self._closed = True
        self._stop_listening()
        tasks = [*self._tasks, *([self._mirror] if self._mirror is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def broken(self, fault: NetworkFault, concerns: Concerns | None = None) -> AsyncIterator[None]:
        """The fault lasts for the time of the context; see ``begin``."""
        await self.begin(fault, concerns)
        try:
            yield
        finally:
            await self.end()

    async def begin(self, fault: NetworkFault, concerns: Concerns | None = None) -> None:
        """The fault lasts from now on, in place of a former one; it concerns all connections unless ``concerns`` says
        which."""
        await self.end()
        self._fault, self._concerns = fault, concerns
        for connection in list(self._connections):
            if self._is_concerned(connection):
                connection.suffer(fault, fault.open)
        if fault.new is Treatment.CLOSE and concerns is None:
            self._stop_listening()

    async def end(self) -> None:
        """Every byte passes again; what was held back arrives now."""
        self._fault, self._concerns = _NO_FAULT, None
        for connection in self._connections:
            connection.recover()
        if self._server is None and not self._closed and await self.target_listens():
            await self._listen()

    async def exchange_tls(self, tls: ssl.SSLContext) -> None:
        """New connections meet another certificate, or other demands; open ones end."""
        self._tls = tls
        self._stop_listening()
        for connection in list(self._connections):
            connection.end(reset=False)
        await self._listen()

    async def target_ended(self) -> None:
        """Refuse connections until the server listens again. To be called where its end is known; the proxy finds it
        out by itself at the next connection."""
        if self._mirror is None or self._mirror.done():
            self._stop_listening()
            self._mirror = asyncio.create_task(self._listen_with_target(), name="await a server")

    def _is_concerned(self, connection: _Connection) -> bool:
        return self._concerns is None or self._concerns(connection.client_port, self.port)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, self.port, ssl=self._tls, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _listen_with_target(self) -> None:
        while not await self.target_listens():  # noqa: ASYNC110 - nothing says so
            await asyncio.sleep(_LOOK_EVERY_S)
        if not (self._fault.new is Treatment.CLOSE and self._concerns is None) and self._server is None:
            await self._listen()

    async def target_listens(self) -> bool:
        """Whether the server accepts connections now."""
        try:
            _, writer = await asyncio.open_connection(HOST, self.target_port)
        except OSError:
            return False
        writer.close()
        return True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # an end of the connection on either side, or of the proxy: asyncio would log it
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        try:
            server_reader, server_writer = await asyncio.open_connection(HOST, self.target_port)
        except OSError:
            connection.end(reset=True)
            await self.target_ended()
            return
        connection.server_writer = server_writer
        self._connections.add(connection)
        if self._is_concerned(connection):
            connection.suffer(self._fault, self._fault.new)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(connection.pump(reader, server_writer, to_server=True))
                pumps.create_task(connection.pump(server_reader, writer, to_server=False))
        except* OSError:
            connection.end(reset=True)
        finally:
            self._connections.discard(connection)
            server_writer.transport.abort()
        if not await self.target_listens():
            await self.target_ended()


class _Connection:
    """The two directions of one connection, and what the fault of now does to them."""

    def __init__(self, client_writer: asyncio.StreamWriter) -> None:
        self.client_port: int = client_writer.get_extra_info("peername")[1]
        self.server_writer: asyncio.StreamWriter | None = None
        self._client_writer = client_writer
        self._requests_pass, self._replies_pass = asyncio.Event(), asyncio.Event()
        self._requests_pass.set()
        self._replies_pass.set()
        self._fault = _NO_FAULT
        self._spoils = False

    def suffer(self, fault: NetworkFault, treatment: Treatment) -> None:
        self._fault = fault
        if treatment in (Treatment.CLOSE, Treatment.RESET):
            self.end(reset=treatment is Treatment.RESET)
        if treatment in (Treatment.HOLD, Treatment.MUTE):
            self._replies_pass.clear()
        if treatment is Treatment.HOLD:
            self._requests_pass.clear()
        self._spoils = treatment is Treatment.GARBAGE

    def recover(self) -> None:
        self._fault, self._spoils = _NO_FAULT, False
        self._requests_pass.set()
        self._replies_pass.set()

    def end(self, *, reset: bool) -> None:
        """End both sides at once; with ``reset`` by RST."""
        for writer in (self._client_writer, self.server_writer):
            if writer is None:
                continue
            if reset and (plain := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool) -> None:
        """Pass one direction on until it ends. A direction that ends closes its other end for writing."""
        passes = self._requests_pass if to_server else self._replies_pass
        loop, due_s = asyncio.get_running_loop(), 0.0
        while True:
            data = await reader.read(_CHUNK_BYTES)
            await passes.wait()
            if self._spoils and data and not to_server:
                writer.write(_garbage())
                await writer.drain()
                raise ConnectionResetError("the reply was spoiled")
            fault = self._fault
            due_s = max(due_s + _IN_ORDER_S, loop.time() + fault.delay_s)
            if due_s > loop.time():  # later bytes may follow before these are due, so nothing sleeps here
                loop.call_at(due_s, _write, writer, data)
            else:
                _write(writer, data)
                await writer.drain()
            if not data:
                await asyncio.sleep(max(0.0, due_s - loop.time()) + _IN_ORDER_S)
                return
            if fault.bytes_per_s is not None:
                await asyncio.sleep(len(data) / fault.bytes_per_s)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if writer.transport.is_closing():
        return
    if data:
        writer.write(data)
    elif writer.can_write_eof():
        with contextlib.suppress(OSError):  # it ended meanwhile
            writer.write_eof()
    else:  # TLS
        writer.close()


def _garbage() -> bytes:
    """Bytes that are neither HTTP, nor the size of a chunk, nor a reply of a store."""
    return b"\xff\x00" + os.urandom(_GARBAGE_BYTES)
