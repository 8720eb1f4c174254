"""The load generator's client against servers that do not behave."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from dualmap.runtime.pool_settings import UpstreamSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.http_client import HttpClient, HttpClientError


@asynccontextmanager
async def scripted_server(*answers: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that gives each connection's requests these answers in turn and then closes it."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        for answer in answers:
            if not await reader.read(65_536):
                break
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


async def test_connections_are_kept_alive(emulator: EmulatedInstance) -> None:
    client = HttpClient(emulator.url)
    for _ in range(3):
        status, body = await client.read("/load")
        assert (status, body) == (200, b'{"server_load":0}')
    assert len(client._idle) == 1
    client.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello",
    ],
)
async def test_a_body_is_read_however_it_is_framed(answer: bytes) -> None:
    async with scripted_server(answer) as (url, _connections):
        client = HttpClient(url)
        assert await client.read("/") == (200, b"hello")
        client.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n",
        b"what?\r\n\r\n",
    ],
)
async def test_an_incomplete_response_is_an_error(answer: bytes) -> None:
    async with scripted_server(answer) as (url, _connections):
        client = HttpClient(url)
        with pytest.raises(HttpClientError):
            await client.read("/")
        client.close()


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    async with scripted_server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok") as (url, made):
        client = HttpClient(url)
        assert [await client.read("/") for _ in range(2)] == [(200, b"ok")] * 2
        assert len(made) == 2
        client.close()


async def test_cancelling_a_request_closes_its_connection(
    emulator: EmulatedInstance, eventually: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    client = HttpClient(emulator.url)
    body = b'{"prompt":"x","max_tokens":9000}'
    asking = asyncio.create_task(client.request("POST", "/v1/completions", body))
    await eventually(lambda: emulator.generator.active == 1)
    asking.cancel()
    await eventually(lambda: emulator.generator.active == 0)
    assert not client._idle


async def test_nobody_listening_is_an_error() -> None:
    async with scripted_server() as (url, _connections):
        pass
    with pytest.raises(HttpClientError, match="cannot connect"):
        await HttpClient(url).read("/")


def test_other_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="no http"):
        HttpClient("redis://x")


async def test_a_server_with_a_certificate_of_the_given_ca_is_trusted(tmp_path: Path) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(tls)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        trusting = HttpClient(url, trust=InstanceTrust(UpstreamSettings(ca_file=ca_file)))
        assert await trusting.read("/") == (200, b"ok")
        trusting.close()
        with pytest.raises(HttpClientError, match="certificate"):
            await HttpClient(url).read("/")
