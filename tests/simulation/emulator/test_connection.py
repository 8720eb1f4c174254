"""HTTP as it should not come, and as it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dualmap.simulation.emulator import connection
from dualmap.simulation.emulator.instance import EmulatedInstance


@asynccontextmanager
async def connected(
    emulator: EmulatedInstance,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(emulator.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_pipelined_requests_are_answered_in_order(emulator: EmulatedInstance) -> None:
    async with connected(emulator) as (reader, writer):
        writer.write(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
    load, nothing, version = answer.split(b"HTTP/1.1 ")[1:]
    assert load.startswith(b"200") and load.endswith(b'{"server_load":0}')
    assert nothing.startswith(b"404")
    assert version.startswith(b"200") and b"connection: close" in version


@pytest.mark.parametrize("path", ["/load", "/metrics", "/health", "/v1/models", "/tokenize", "/v1/responses/x", "/no"])
async def test_an_answer_to_head_ends_with_its_head(emulator: EmulatedInstance, path: str) -> None:
    async with connected(emulator) as (reader, writer):
        writer.write(b"HEAD %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
    head, version = answer.split(b"HTTP/1.1 ")[1:]
    assert head.endswith(b"\r\n\r\n") and head.count(b"\r\n\r\n") == 1
    assert version.startswith(b"200") and version.endswith(b"}")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" + b"y" * 2000, b"413"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_the_connection_closed(
    emulator: EmulatedInstance, sent: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 1000)
    async with connected(emulator) as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_a_client_that_expects_to_continue_is_told_so(emulator: EmulatedInstance) -> None:
    async with connected(emulator) as (reader, writer):
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 18\r\nexpect: 100-continue\r\n\r\n"
        writer.write(head)
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b'{"prompt":"abcde"}')
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)).startswith(b"HTTP/1.1 200")


async def test_a_request_may_come_byte_by_byte(emulator: EmulatedInstance) -> None:
    async with connected(emulator) as (reader, writer):
        for byte in b"GET /health?probe=1 HTTP/1.1\r\nhost: x\r\n\r\n":
            writer.write(bytes((byte,)))
            await writer.drain()
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)).startswith(b"HTTP/1.1 200")
