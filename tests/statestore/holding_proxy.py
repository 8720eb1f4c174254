"""A way to a server which holds bytes back and delivers them later, as a network that was cut does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class HoldingProxy:
    """Passes bytes on, until ``mark`` is in what a client sends: from then on it holds what clients send."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.port = 0
        self.mark: bytes | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.replies = bytearray()
        """The replies of the server, also to clients that had left."""

    @property
    def holds(self) -> bool:
        return not self._open.is_set()

    def deliver(self) -> None:
        """Pass on what is held, also of clients that have left."""
        self.mark = None
        self._open.set()

    def open_for_new(self) -> None:
        """Go on holding what is held, and pass on what new connections send."""
        self.mark = None
        self._open = asyncio.Event()
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers += (writer, behind_writer)
        for passing in (self._send(reader, behind_writer), self._answer(behind_reader, writer)):
            self._tasks.add(asyncio.create_task(passing))

    async def _send(self, reader: asyncio.StreamReader, behind: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the client broke the connection off
            while data := await reader.read(1 << 16):
                await self._pass(data, behind)
        behind.write_eof()

    async def _pass(self, data: bytes, behind: asyncio.StreamWriter) -> None:
        if self.mark is not None and self.mark in data:
            self._open.clear()
        await self._open.wait()
        behind.write(data)

    async def _answer(self, behind: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await behind.read(1 << 16):
            self.replies += data
            writer.write(data)
        writer.close()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@contextlib.asynccontextmanager
async def holding_proxy(port: int) -> AsyncIterator[HoldingProxy]:
    proxy = HoldingProxy(port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.stop()
