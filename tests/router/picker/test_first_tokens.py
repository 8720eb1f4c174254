"""Reports of first tokens over a socket, as a gateway sends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dualmap.router.picker.first_tokens import FirstTokens


@pytest.fixture
async def first_tokens() -> AsyncIterator[FirstTokens]:
    found = FirstTokens()
    await found.start("127.0.0.1", 0, "127.0.0.1")
    yield found
    found.close()


async def opened(place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = place.partition("/")[0].rpartition(":")
    return await asyncio.open_connection(host, int(port))


def report(place: str, *fields: str) -> bytes:
    lines = (f"POST /{place.rpartition('/')[2]} HTTP/1.1", "host: picker", *fields, "", "")
    return "\r\n".join(lines).encode()


async def test_each_stream_is_told_once_of_its_own_report(first_tokens: FirstTokens) -> None:
    seen: list[str] = []
    places = [first_tokens.expect(lambda name=name: seen.append(name)) for name in ("one", "two")]
    reader, writer = await opened(places[0])

    writer.write(report(places[1], "content-length: 0"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
    assert seen == ["two"]

    both = report(places[0]) + report(places[1])  # pipelined, and cut anywhere
    writer.write(both[:30])
    await writer.drain()
    await asyncio.sleep(0)
    writer.write(both[30:])
    for _ in range(2):
        await reader.readuntil(b"\r\n\r\n")
    assert seen == ["two", "one"]
    assert len(first_tokens) == 0
    writer.close()


async def test_what_is_forgotten_and_what_is_unknown_is_told_to_nobody(first_tokens: FirstTokens) -> None:
    seen: list[str] = []
    place = first_tokens.expect(lambda: seen.append("late"))
    first_tokens.forget(place)
    reader, writer = await opened(place)
    writer.write(report(place) + report("x/guessed"))
    for _ in range(2):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
    assert seen == []
    writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /x HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc",
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"no words\r\n\r\n",
        b"x" * 40_000,
    ],
)
async def test_what_is_no_report_ends_its_connection(first_tokens: FirstTokens, sent: bytes) -> None:
    reader, writer = await opened(first_tokens.expect(lambda: None))
    writer.write(sent)
    try:
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_where_this_picker_has_no_address_nothing_is_awaited(caplog: pytest.LogCaptureFixture) -> None:
    first_tokens = FirstTokens()
    await first_tokens.start("127.0.0.1", 0, "no-such-host.invalid")
    assert not first_tokens.listens
    assert "no-such-host.invalid" in caplog.text
    first_tokens.close()
