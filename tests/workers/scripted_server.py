"""An instance whose answers a test writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dualmap.scheduling.placing.placement import PlaceStatus

AddInstance = Callable[..., Awaitable[None]]
Reserve = Callable[..., Awaitable[PlaceStatus]]


class ScriptedServer:
    """An HTTP server whose answers a test writes: path to (status, body), to a pause, or to a dropped connection."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str] | float | None] = {"/health": (200, "")}
        self.requests: list[tuple[str, bytes]] = []
        self.heads: list[str] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"

    async def drop_connections(self) -> None:
        """Close every open connection, as a restart of the process does."""
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.drop_connections()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.decode())
        path = head.split(b" ", 2)[1].decode()
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
        self.requests.append((path, await reader.readexactly(length)))
        answer = self.answers.get(path, (404, ""))
        if answer is None:
            return False
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return False
        status, body = answer
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        return True
