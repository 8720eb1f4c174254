from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dualmap.router.answers.head import AnswerHead
from dualmap.router.errors import OutOfFilesError
from dualmap.router.http.deadlines import DeadlineChecks
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.router.http.upstream_pool import ConnectError, Origin, UpstreamPool, parse_origin
from dualmap.scheduling.request.outcome import FailureKind
from tests.router.http import kit
from tests.router.http.kit import StartInstance, Talk


class Sink:
    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.body = b""

    def head_received(self, head: AnswerHead) -> None:
        self.head = head

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        self.body += b"".join(pieces)
        if complete:
            self.done.set_result(self.body)

    def failed(self, failure: Any) -> None:
        self.done.set_result(failure)


@pytest.fixture
def pool() -> Any:
    def make(**changes: Any) -> Any:
        return UpstreamPool(
            DeadlineChecks(0.02), **{"connect_timeout_s": 2.0, "idle_s": 60.0, "max_idle": 2, **changes}
        )

    return make


async def ask(connection: Any) -> Any:
    sink = Sink()
    connection.start([b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"])
    connection.answer_to(sink)
    return await asyncio.wait_for(sink.done, 60)


async def acquire(pool: UpstreamPool, url: str) -> UpstreamConnection:
    return pool.take_idle(url) or await pool.connect(url)


async def answer(talk: Talk) -> None:
    await talk.answer({"ok": 1})


def test_an_origin_is_read_from_a_url() -> None:
    assert parse_origin("http://h:81") == Origin("h", 81, False, b"h:81", b"")
    assert parse_origin("https://u:p@h/base/") == Origin("h", 443, True, b"h", b"/base")
    assert parse_origin("http://[::1]:8000").host == "::1"
    for wrong in ("ftp://h", "h:80", "http://", "http://h:99999"):
        with pytest.raises(ValueError):
            parse_origin(wrong)


async def test_a_connection_sends_small_writes_at_once(pool: Any, start_instance: StartInstance) -> None:
    instance = await start_instance(answer)

    connection = await acquire(pool(), instance.url)

    connected = connection._transport.get_extra_info("socket")
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.abort()


async def test_a_used_connection_is_given_out_again_last_used_first(pool: Any, start_instance: StartInstance) -> None:
    instance, subject = await start_instance(answer), pool()
    first, second = await acquire(subject, instance.url), await acquire(subject, instance.url)
    assert not first.reused
    for connection in (first, second):
        assert await ask(connection) == b'{"ok":1}'
        subject.release(connection)
    assert await acquire(subject, instance.url) is second and second.reused
    assert await acquire(subject, instance.url) is first
    assert instance.connections == 2
    for connection in (first, second):
        connection.abort()


async def test_no_more_idle_connections_are_kept_than_allowed(pool: Any, start_instance: StartInstance) -> None:
    instance, subject = await start_instance(answer), pool(max_idle=1)
    connections = [await acquire(subject, instance.url) for _ in range(3)]
    for connection in connections:
        await ask(connection)
        subject.release(connection)
    assert subject.idle_connections == 1
    await kit.eventually(lambda: instance.open == 1)
    subject.close()
    await kit.eventually(lambda: instance.open == 0)


async def test_an_aged_connection_is_closed(pool: Any, start_instance: StartInstance) -> None:
    instance, subject = await start_instance(answer), pool(idle_s=0.05)
    connection = await acquire(subject, instance.url)
    await ask(connection)
    subject.release(connection)
    await kit.eventually(lambda: subject.idle_connections == 0 and instance.open == 0)


async def test_a_connection_that_its_instance_closed_is_not_given_out(pool: Any, start_instance: StartInstance) -> None:
    async def answer_and_close(talk: Talk) -> None:
        await talk.answer({"ok": 1})
        talk.writer.close()

    instance, subject = await start_instance(answer_and_close), pool()
    connection = await acquire(subject, instance.url)
    await ask(connection)
    subject.release(connection)
    await kit.eventually(lambda: connection.closed)
    fresh = await acquire(subject, instance.url)
    assert fresh is not connection and not fresh.reused
    fresh.abort()


async def test_an_instance_that_speaks_unasked_is_not_listened_to(pool: Any, start_instance: StartInstance) -> None:
    async def answer_twice(talk: Talk) -> None:
        await talk.answer({"ok": 1})
        await asyncio.sleep(0.02)
        await talk.answer({"evil": 1})

    instance, subject = await start_instance(answer_twice), pool()
    connection = await acquire(subject, instance.url)
    await ask(connection)
    subject.release(connection)
    await kit.eventually(lambda: connection.closed)
    assert not connection.reusable


async def test_a_connection_whose_instance_spoke_unasked_is_not_used_even_before_it_was_heard(
    pool: Any, start_instance: StartInstance
) -> None:
    sent = threading.Event()

    async def answer_twice(talk: Talk) -> None:
        await talk.answer({"ok": 1})
        sender = talk.writer.get_extra_info("socket").dup()
        threading.Thread(target=speak, args=(sender,)).start()

    def speak(sender: socket.socket) -> None:
        spoken.wait(5)
        sender.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno")
        sender.close()
        sent.set()

    spoken = threading.Event()
    instance, subject = await start_instance(answer_twice), pool()
    connection = await acquire(subject, instance.url)
    await ask(connection)
    subject.release(connection)
    await asyncio.sleep(0)
    spoken.set()
    assert sent.wait(5)  # the loop stands still meanwhile: it has not read what came
    fresh = await acquire(subject, instance.url)
    assert fresh is not connection and not fresh.reused
    fresh.abort()


@pytest.mark.parametrize("closing", ["connection: close\r\n", ""])
async def test_an_answer_that_closes_its_connection_is_not_reused(
    pool: Any, start_instance: StartInstance, closing: str
) -> None:
    async def last(talk: Talk) -> None:
        version = "1.1" if closing else "1.0"
        await talk.send(f"HTTP/{version} 200 OK\r\ncontent-length: 2\r\n{closing}\r\n{{}}".encode())

    instance, subject = await start_instance(last), pool()
    connection = await acquire(subject, instance.url)
    assert await ask(connection) == b"{}"
    subject.release(connection)
    assert subject.idle_connections == 0


async def test_no_connection_within_the_time_is_a_connect_failure(pool: Any) -> None:
    """A listener whose backlog is full takes no further connection."""
    subject, kept = pool(connect_timeout_s=0.2), []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConnectError) as caught:
            for _ in range(10):
                kept.append(await acquire(subject, url))
        assert caught.value.failure.kind is FailureKind.CONNECT
        for connection in kept:
            connection.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:80", "ftp://h"])
async def test_what_cannot_be_reached_is_a_connect_failure(pool: Any, url: str) -> None:
    with pytest.raises(ConnectError):
        await acquire(pool(), url)


async def test_a_plain_server_behind_https_is_a_connect_failure(pool: Any, start_instance: StartInstance) -> None:
    instance = await start_instance(answer)
    with pytest.raises(ConnectError) as caught:
        await acquire(pool(connect_timeout_s=0.3), instance.url.replace("http:", "https:"))
    assert isinstance(caught.value.__cause__, ssl.SSLError | ConnectionError | TimeoutError)


async def test_a_shortage_of_descriptors_is_no_failure_of_the_instance_and_is_logged_now_and_then(
    pool: Any,
    start_instance: StartInstance,
    no_files_left: Callable[[], contextlib.AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, subject = await start_instance(answer), pool()

    with no_files_left():
        for _ in range(3):
            with pytest.raises(OutOfFilesError, match="limit of open files"):
                await acquire(subject, instance.url)

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "router.max_connections" in caplog.text
    (await acquire(subject, instance.url)).abort()
