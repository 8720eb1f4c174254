"""One connection: batches, order, timeouts, loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from redis.asyncio import ConnectionPool

from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.redis.servers import Servers
from statestore.redis.wire import Wire
from tests.statestore.scripted_server import ScriptedServer, scripted_server
from tests.statestore.tls_front import Authority, tls_front

PING = b"*1\r\n$4\r\nPING\r\n"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as scripted:
        yield scripted


@pytest.fixture
async def wire(server: ScriptedServer) -> AsyncIterator[Wire]:
    """To the scripted server, which has seen nothing yet but the greeting."""
    opened = await Wire.open(server.connections(), 0.1)
    server.reads.clear()
    yield opened
    opened.abort()


async def until_lost(wire: Wire) -> None:
    async with asyncio.timeout(60):
        while wire.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_commands_of_one_turn_leave_in_one_write_after_the_first_and_are_answered_in_order(
    server: ScriptedServer, wire: Wire
) -> None:
    server.answer = lambda command: b"$%d\r\n%s\r\n" % (len(command[1]), command[1])

    answers = await asyncio.gather(*(wire.send(b"*2\r\n$4\r\nECHO\r\n$2\r\n%d\r\n" % n) for n in range(10, 99)))

    assert answers == [b"%d" % number for number in range(10, 99)]
    assert len(server.reads) <= 2


async def test_a_silent_server_is_given_up_and_everything_in_flight_fails(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: None

    results = await asyncio.wait_for(asyncio.gather(*(wire.send(PING) for _ in range(3)), return_exceptions=True), 60)

    assert [type(result) for result in results] == [StoreUnavailableError] * 3
    assert "does not answer in time" in str(results[0])
    assert not wire.is_connected


async def test_a_lost_connection_fails_what_is_in_flight(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: None
    waiting = wire.send(PING)

    server.hang_up()

    with pytest.raises(StoreUnavailableError, match="connection to the store was lost"):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(StoreUnavailableError, match="connection to the store was lost"):
        await wire.send(PING)


async def test_a_caller_that_gives_up_does_not_shift_the_answers_of_others(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: None
    leaver, stayer = wire.send(PING), wire.send(PING)

    leaver.cancel()
    server.writers[0].write(b"+first\r\n+second\r\n")

    assert await asyncio.wait_for(stayer, 60) == b"second"


async def test_garbage_from_the_server_ends_the_connection(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: b"HTTP/1.1 400 Bad Request\r\n\r\n"

    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(wire.send(PING), 60)


async def test_a_reply_nobody_asked_for_ends_the_connection(server: ScriptedServer, wire: Wire) -> None:
    server.writers[0].write(b"+surprise\r\n")

    await until_lost(wire)


async def test_a_server_that_became_a_read_only_copy_is_left(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: b"-READONLY You can't write against a read only replica.\r\n"

    with pytest.raises(StoreUnavailableError, match="another server"):
        await wire.send(PING)

    await until_lost(wire)


class OneConnection:
    """A pool of one connection, that is open already."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def make_connection(self) -> Any:
        return self._connection


async def test_a_connection_that_ends_before_it_is_taken_over_is_lost(server: ScriptedServer) -> None:
    connection = server.connections().make_connection()
    await connection.connect()
    server.hang_up()
    async with asyncio.timeout(60):
        while not connection._reader.at_eof():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    wire = await Wire.open(cast(ConnectionPool, OneConnection(connection)), 0.1)

    assert not wire.is_connected


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_are_taken_over_on_either_event_loop_with_tls_and_without(
    run: Callable[[Coroutine[None, None, None]], None], valkey_url: str, tmp_path: Path
) -> None:
    authority, port = Authority(tmp_path), int(valkey_url.rpartition(":")[2].partition("/")[0])
    keys = PoolKeys("dualmap", "default")

    async def ping_by(url: str) -> None:
        wire = await Wire.open(Servers(url, 5.0).connections(keys), 5.0)
        assert await asyncio.gather(wire.send(PING), wire.send(PING)) == [b"PONG", b"PONG"]
        wire.abort()
        await until_lost(wire)

    async def ping_both() -> None:
        await ping_by(f"redis://127.0.0.1:{port}")
        async with tls_front(authority.server("127.0.0.1"), port) as front:
            await ping_by(f"rediss://127.0.0.1:{front}?ssl_ca_certs={authority.file}")

    run(ping_both())
