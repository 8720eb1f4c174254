"""The network between two ends, broken on purpose: what each fault does to bytes and to connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dualmap.research.chaos.fault_proxy import (
    BLACK_HOLE,
    CUT,
    GARBAGE,
    HALF_OPEN,
    HOST,
    LEFT_OPEN,
    RESET,
    FaultProxy,
    NetworkFault,
)
from dualmap.research.chaos.proc import owns_connection

WITHIN_S = 20.0


class Echo:
    """A server that answers each line with the same line, and keeps what it got."""

    def __init__(self) -> None:
        self.got = bytearray()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.got += line
                writer.write(line)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def port(self) -> int:
        return int(self.writer.get_extra_info("sockname")[1])

    async def says(self, line: bytes) -> bytes:
        self.writer.write(line + b"\n")
        async with asyncio.timeout(WITHIN_S):
            return (await self.reader.readline()).rstrip(b"\n")

    async def end(self) -> bytes:
        """The bytes that still come until the connection ends. Raises ConnectionResetError."""
        async with asyncio.timeout(WITHIN_S):
            return await self.reader.read()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    server = Echo()
    await server.start()
    yield server
    server.stop()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(echo.port)
    await proxy.start()
    yield proxy
    await proxy.close()


Connect = Callable[[], Awaitable[Client]]


@pytest.fixture
async def connect(proxy: FaultProxy) -> AsyncIterator[Connect]:
    """Makes a connection through the proxy."""
    clients: list[Client] = []

    async def connected() -> Client:
        clients.append(Client(*await asyncio.open_connection(HOST, proxy.port)))
        return clients[-1]

    yield connected
    for client in clients:
        client.writer.transport.abort()


async def is_refused(proxy: FaultProxy) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, proxy.port)
    except ConnectionRefusedError:
        return True
    writer.transport.abort()
    return False


async def until_refused(proxy: FaultProxy, *, refused: bool) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await is_refused(proxy) is not refused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_without_a_fault_every_byte_passes(connect: Connect) -> None:
    client = await connect()
    long = os.urandom(30_000).hex().encode()

    assert await client.says(b"hello") == b"hello"
    assert await client.says(long) == long


async def test_bytes_that_are_held_arrive_late_and_in_order(proxy: FaultProxy, echo: Echo, connect: Connect) -> None:
    client = await connect()
    await client.says(b"first")
    await proxy.begin(BLACK_HOLE)

    reply = asyncio.create_task(client.says(b"second"))
    another = await connect()
    silent = asyncio.create_task(another.says(b"third"))
    await asyncio.sleep(0.1)

    assert not reply.done() and not silent.done()
    assert bytes(echo.got) == b"first\n"
    await proxy.end()
    assert await reply == b"second"
    assert await silent == b"third"


async def test_a_half_open_connection_takes_requests_and_gives_no_reply(
    proxy: FaultProxy, echo: Echo, connect: Connect
) -> None:
    client = await connect()
    await proxy.begin(HALF_OPEN)
    reply = asyncio.create_task(client.says(b"heard"))
    async with asyncio.timeout(WITHIN_S):
        while not echo.got:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    assert not reply.done()
    await proxy.end()
    assert await reply == b"heard"


async def test_a_cut_ends_open_connections_and_refuses_new_ones(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await client.says(b"hello")

    await proxy.begin(CUT)

    assert await client.end() == b""
    await until_refused(proxy, refused=True)
    await proxy.end()
    assert await (await connect()).says(b"again") == b"again"


async def test_a_reset_resets(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await client.says(b"hello")

    await proxy.begin(RESET)

    with pytest.raises(ConnectionResetError):
        await client.end()
    new = await connect()
    with pytest.raises(ConnectionResetError):
        await new.end()


async def test_streams_may_be_left_open_while_new_connections_are_refused(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await client.says(b"hello")
    await proxy.begin(LEFT_OPEN)

    reply = asyncio.create_task(client.says(b"anybody?"))
    await until_refused(proxy, refused=True)

    assert not reply.done()
    await proxy.end()
    assert await reply == b"anybody?"


async def test_garbage_comes_instead_of_a_reply_and_the_connection_ends(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await proxy.begin(GARBAGE)
    client.writer.write(b"hello\n")

    try:
        came = await client.end()
    except ConnectionResetError:
        came = b"\xff"

    assert came.startswith(b"\xff") and b"hello" not in came


async def test_delayed_bytes_keep_their_order_and_their_distance(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await proxy.begin(NetworkFault(delay_s=0.1))
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    for number in range(200):
        client.writer.write(b"%d\n" % number)
        if number % 7 == 0:
            await asyncio.sleep(0)
    client.writer.write_eof()
    lines = (await client.end()).split()

    assert lines == [b"%d" % number for number in range(200)]
    assert loop.time() - began_s >= 0.2, "each direction takes its time"


async def test_a_slow_network_limits_the_bytes_of_a_second(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await proxy.begin(NetworkFault(bytes_per_s=20_000))
    began_s = asyncio.get_running_loop().time()

    for _ in range(3):
        await client.says(b"x" * 2_000)

    assert asyncio.get_running_loop().time() - began_s >= 0.15


async def test_a_fault_may_concern_the_connections_of_some_clients_alone(proxy: FaultProxy, connect: Connect) -> None:
    concerned, other = await connect(), await connect()
    await concerned.says(b"hello")
    await other.says(b"hello")

    await proxy.begin(CUT, lambda port, _: port == concerned.port)

    assert await concerned.end() == b""
    assert await other.says(b"still here") == b"still here"


async def test_the_owner_of_a_connection_is_found(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    await client.says(b"hello")

    assert owns_connection([os.getpid()], client.port, proxy.port)
    assert not owns_connection([os.getppid()], client.port, proxy.port)
    assert not owns_connection([os.getpid()], client.port, 1)


async def test_where_the_server_is_gone_connections_are_refused_until_it_is_back(
    proxy: FaultProxy, echo: Echo, connect: Connect
) -> None:
    client = await connect()
    await client.says(b"hello")
    echo.stop()
    await proxy.target_ended()

    await until_refused(proxy, refused=True)

    await echo.start()
    await until_refused(proxy, refused=False)
    assert await (await connect()).says(b"again") == b"again"


async def test_a_server_that_ended_unseen_is_found_out_by_the_next_connection(
    proxy: FaultProxy, echo: Echo, connect: Connect
) -> None:
    echo.stop()

    client = await connect()
    with pytest.raises(ConnectionResetError):
        await client.end()

    await until_refused(proxy, refused=True)
