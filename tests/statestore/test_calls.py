"""Scripts on a server that forgets them."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import urlsplit

from statestore.connection import Connection
from statestore.endpoint import Endpoint
from statestore.packing import Argument
from statestore.redis.calls import Calls
from statestore.scripts import load_scripts


class ForgetfulServer:
    """A connection to a server whose scripts somebody flushes right after each was loaded."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def command(self, *arguments: Argument) -> Any:
        reply = await self._connection.command(*arguments)
        if arguments[:2] == ("SCRIPT", "LOAD"):
            await self._connection.command("SCRIPT", "FLUSH")
        return reply


async def test_a_script_runs_though_it_is_flushed_between_loading_and_running(valkey_url: str) -> None:
    async def resolve() -> Endpoint:
        return Endpoint(port=urlsplit(valkey_url).port or 0)

    connection = Connection(resolve, connect_timeout_s=5.0, command_timeout_s=5.0)
    server = ForgetfulServer(connection)
    await server.command("SCRIPT", "FLUSH")
    calls = Calls(cast(Connection, server), load_scripts(), lambda: 5)

    known = [await calls.script("beat_replica", (b"replicas",), "one", 1000, "{}") for _ in range(2)]

    assert known == [0, 1]
    await connection.close()
