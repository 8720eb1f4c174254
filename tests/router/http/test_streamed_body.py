"""Bodies that are answered while they come: files that clients upload."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dualmap.router.http.request_reader import STAGE_BYTES
from dualmap.router.http.streamed_body import HELD_BYTES
from tests.router.http import kit
from tests.router.http.kit import Client, Router, StartRouter

FILES = "/v1/files"
Serve = Callable[..., Awaitable[tuple[Router, Client]]]


class Uploads:
    """An application that reads what is uploaded, once it may."""

    def __init__(self) -> None:
        self.received = 0
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.received, more = 0, True
        while more:
            message = await receive()
            self.received += len(message["body"])
            more = message["more_body"]
            await self.may_read.wait()
        answer = b'{"bytes": %d}' % self.received
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture
def serve(start_router: StartRouter, tmp_path: Path) -> Serve:
    async def start(app: Any, **settings: Any) -> Any:
        router = await start_router(kit.Intake([]), app=app, batches={"storage": str(tmp_path)}, **settings)
        return router, await router.connect()

    return start


def head(size_bytes: int, fields: str = "") -> bytes:
    return f"POST {FILES} HTTP/1.1\r\nhost: h\r\ncontent-length: {size_bytes}\r\n{fields}\r\n".encode()


async def test_a_file_larger_than_all_bodies_together_is_read_while_it_comes(serve: Serve) -> None:
    uploads = Uploads()
    router, client = await serve(uploads, max_body_bytes=1 << 20, max_buffered_body_bytes=1 << 20)
    size_bytes = 8 << 20
    client.request(FILES, bytes(size_bytes))
    client.request("/v1/batches", {"k": 1})

    assert (await client.answer()).json() == {"bytes": size_bytes}
    assert (await client.answer()).json() == {"bytes": 7}, "the next request is where the file ends"
    assert router.plane.bodies.held_bytes == 0


async def test_a_chunked_file_is_read_to_its_end(serve: Serve) -> None:
    uploads = Uploads()
    _, client = await serve(uploads)
    client.send(f"POST {FILES} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for _ in range(3):
        client.send(b"5\r\nhello\r\n")
        await asyncio.sleep(0)
    client.send(b"0\r\n\r\n")

    assert (await client.answer()).json() == {"bytes": 15}


async def test_a_client_is_not_read_faster_than_its_file_is_stored(serve: Serve) -> None:
    uploads = Uploads()
    uploads.may_read.clear()
    router, client = await serve(uploads)
    size_bytes = 32 << 20
    client.request(FILES, bytes(size_bytes))
    await kit.eventually(lambda: router.plane.bodies.held_bytes > HELD_BYTES)
    assert router.plane.bodies.held_bytes < 8 * HELD_BYTES

    uploads.may_read.set()

    assert (await client.answer()).json() == {"bytes": size_bytes}


async def test_a_client_that_waits_for_leave_is_given_it(serve: Serve) -> None:
    _, client = await serve(Uploads())
    client.send(head(5, "expect: 100-continue\r\n"))
    assert (await client.head()).status == 100
    client.send(b"hello")
    assert (await client.answer()).json() == {"bytes": 5}


async def test_an_answer_before_the_end_of_the_file_closes_the_connection(serve: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    router, client = await serve(app)
    client.send(head(100) + b"x")

    answer = await client.answer()
    assert answer.status == 429 and answer.headers["connection"] == "close"
    client.send(b"x" * 99)
    assert await client.closed()
    assert router.plane.bodies.held_bytes == 0


async def test_an_application_hears_of_a_client_that_left_within_its_file(serve: Serve) -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            heard.append(message["type"])
        heard.append(message["type"])

    _, client = await serve(app)
    client.send(head(100) + b"x")
    await kit.eventually(lambda: bool(heard))
    client.writer.transport.abort()

    await kit.eventually(lambda: heard == ["http.request", "http.disconnect"])


async def test_a_file_over_its_limit_is_refused_where_it_was_not_announced(serve: Serve) -> None:
    uploads = Uploads()
    _, client = await serve(uploads, max_body_bytes=1024, max_buffered_body_bytes=1 << 20)
    client.send(f"POST {FILES} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    piece = b"x" * (1 << 20)
    for _ in range(201):
        client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await asyncio.sleep(0)

    answer = await client.answer()
    assert answer.status == 413 and "router.batches.max_file_bytes" in answer.error["message"]
    assert await client.closed()


async def test_a_slow_client_has_the_time_of_a_request_for_each_part_of_its_file(serve: Serve) -> None:
    uploads = Uploads()
    _, client = await serve(uploads, client_timeout_s=0.6)
    client.send(head(3 * STAGE_BYTES))
    for _ in range(2):
        client.send(bytes(STAGE_BYTES))
        await kit.eventually(lambda: uploads.received > 0)
    deadline = asyncio.get_running_loop().time() + 60
    while not client.reader._buffer:  # type: ignore[attr-defined]
        assert asyncio.get_running_loop().time() < deadline
        client.send(b"y")
        await asyncio.sleep(0.02)

    answer = await client.answer()
    assert answer.status == 408 and "router.client_timeout_s" in answer.error["message"]
    assert uploads.received >= 2 * STAGE_BYTES
