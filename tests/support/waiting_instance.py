"""Inference servers for tests with thousands of requests at once: a request costs little, and waits until the test
lets it be answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

MODEL: Final = "waited-for"
_ANSWER: Final = (
    b'{"id":"x","object":"text_completion","model":"waited-for","choices":[{"index":0,"text":"a","finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_MODELS: Final = b'{"object":"list","data":[{"id":"waited-for","object":"model","max_model_len":8192}]}'


class WaitingInstance:
    """One server. It reads requests as an HTTP/1.1 server does, and answers each inference once ``go_on`` is set."""

    port: int

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.heads: list[bytes] = []
        """Heads of the requests for inference that came, in lower case."""
        self.waiting = 0
        self._connections: set[asyncio.StreamWriter] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, port: int) -> AsyncIterator[WaitingInstance]:
        instance = cls()
        await instance._listen(port)
        try:
            yield instance
        finally:
            instance.die()

    async def _listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096)
        self.port = port

    _server: asyncio.Server

    async def come_back(self) -> None:
        """Listen again if it died, and answer at once, the fleet's health checks too, until ``hold``."""
        self.go_on.set()
        if not self._server.is_serving():
            await self._listen(self.port)

    def hold(self) -> None:
        """Forget the requests that came, and let those to come wait for ``go_on``."""
        self.heads.clear()
        self.go_on.clear()

    def die(self) -> None:
        """Break all connections, and take no more."""
        self._server.close()
        self.go_on.set()
        for each in list(self._connections):
            each.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await _read_body(head, reader)
                body = await self._answer(head)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        if not head.startswith(b"post "):
            return _MODELS if head.startswith(b"get /v1/models ") else b"{}"
        self.heads.append(head)
        self.waiting += 1
        try:
            await self.go_on.wait()
        finally:
            self.waiting -= 1
        return _ANSWER


async def _read_body(head: bytes, reader: asyncio.StreamReader) -> None:
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    if fields.get(b"transfer-encoding") != b"chunked":
        await reader.readexactly(int(fields.get(b"content-length", b"0")))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()
