"""A server that answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool

from dualmap.statestore.redis.connections import connection_pool

Answer = Callable[[list[bytes]], bytes | None]


class ScriptedServer:
    """Answers each command as told, and remembers what arrived in one piece."""

    def __init__(self) -> None:
        self.reads: list[list[list[bytes]]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.answer: Answer = lambda command: b"+OK\r\n"
        self.port = 0

    @property
    def commands(self) -> list[list[bytes]]:
        return [command for read in self.reads for command in read]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        parser = hiredis.Reader()
        while data := await reader.read(1 << 20):
            parser.feed(data)
            read = []
            while (command := parser.gets()) is not False:
                read.append(command)
            self.reads.append(read)
            for command in read:
                answer = self.answer(command)
                if answer is not None:
                    writer.write(answer)
        writer.close()

    def hang_up(self) -> None:
        for writer in self.writers:
            writer.close()

    def connections(self, login: Mapping[str, Any] | None = None) -> ConnectionPool:
        return connections_to(self.port, login)


def connections_to(port: int, login: Mapping[str, Any] | None = None) -> ConnectionPool:
    """Connections to a port of this machine."""
    return connection_pool(("127.0.0.1", port), login or {}, 2.0)


@contextlib.asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    listener = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.port = listener.sockets[0].getsockname()[1]
    try:
        yield scripted
    finally:
        scripted.hang_up()
        listener.close()
