"""One client connection: order, limits, deadlines, and leaving."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from dualmap.router.errors import ShuttingDownError
from dualmap.router.http import client as client_module
from dualmap.router.http.heads import HTTP2_GOAWAY
from dualmap.router.http.request_reader import MAX_PIPELINED_REQUESTS
from dualmap.scheduling.request.outcome import Outcome
from tests.router.http import kit
from tests.router.http.kit import Instance, Router, Script, StartInstance, StartRouter, Talk

ENDING = ShuttingDownError("this replica shuts down; try again", retry_after_s=1.0)


async def echo(talk: Talk) -> None:
    await talk.answer({"echo": orjson.loads(talk.body)["messages"][0]["content"]})


StartFleet = Callable[..., Awaitable[tuple[kit.Intake, Instance, Router]]]


@pytest.fixture
def fleet(start_instance: StartInstance, start_router: StartRouter) -> StartFleet:
    """A router in front of one scripted instance."""

    async def start(
        script: Script = echo, *, gate: asyncio.Event | None = None, draining: Any = lambda: False, **settings: Any
    ) -> Any:
        instance = await start_instance(script)
        intake = kit.Intake([instance.url], gate=gate)
        return intake, instance, await start_router(intake, draining=draining, **settings)

    return start


def chat(text: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


# several requests ----------------------------------------------------------------------------------------------
async def test_one_connection_mixes_inference_and_everything_else(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    client = await router.connect()
    for n in range(3):
        client.request(kit.CHAT, chat(f"q{n}"))
        assert (await client.answer()).json() == {"echo": f"q{n}"}
        client.request("/admin/x%20y?z=1", b'{"a":1}')
        assert (await client.answer()).json() == {"app": "/admin/x y", "method": "POST", "body": '{"a":1}'}
    assert router.state.total_requests == 6


async def test_pipelined_requests_are_answered_in_order(fleet: StartFleet) -> None:
    intake, _, router = await fleet()
    client = await router.connect()
    for n in range(5):
        client.request(kit.CHAT, chat(f"q{n}"))
        client.request(f"/ui/{n}", method="GET")
    for n in range(5):
        assert (await client.answer()).json() == {"echo": f"q{n}"}
        assert (await client.answer()).json()["app"] == f"/ui/{n}"
    assert len(intake.requests) == 5


async def test_a_flood_of_pipelined_requests_is_answered_up_to_a_bound_and_closed(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    client = await router.connect()
    client.send(b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n" * 500)
    answers = 0
    while not client.reader.at_eof():
        answer = await client.answer()
        answers += 1
        if answer.headers.get("connection") == "close":
            break
    assert answers == MAX_PIPELINED_REQUESTS
    assert await client.closed()


async def test_requests_sent_while_one_is_answered_are_bounded_too(fleet: StartFleet) -> None:
    gate = asyncio.Event()
    _, _, router = await fleet(gate=gate)
    client = await router.connect()
    client.request(kit.CHAT, chat("first"))
    for _ in range(3 * MAX_PIPELINED_REQUESTS):
        client.request("/x", method="GET")
        await client.writer.drain()
        await asyncio.sleep(0)
    gate.set()
    assert (await client.answer()).json() == {"echo": "first"}
    answers = 0
    while (await client.answer()).headers.get("connection") != "close":
        answers += 1
    assert answers <= 2 * MAX_PIPELINED_REQUESTS
    assert await client.closed()


async def test_bodies_sent_ahead_are_bounded(fleet: StartFleet) -> None:
    gate = asyncio.Event()
    intake, _, router = await fleet(gate=gate, max_body_bytes=400_000)
    client = await router.connect()
    for _ in range(10):  # each is longer than one read of a socket
        client.request(kit.CHAT, chat("x" * 300_000))
    await kit.eventually(lambda: any(connection._reader.stopped for connection in router.state.connections))
    await kit.eventually(lambda: len(intake.requests) == 1)
    gate.set()
    answers = 1
    while (await client.answer()).headers.get("connection") != "close":
        answers += 1
    assert answers < 6
    assert await client.closed()


async def test_all_bodies_together_are_bounded(fleet: StartFleet) -> None:
    gate = asyncio.Event()
    intake, _, router = await fleet(gate=gate, max_body_bytes=2048, max_buffered_body_bytes=4096)
    held, half_read, refused, later = [await router.connect() for _ in range(4)]
    held.request(kit.CHAT, chat("x" * 1500))
    half_read.send(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 2000\r\n\r\n" % kit.CHAT.encode())
    half_read.send(b"x" * 1900)
    await kit.eventually(lambda: router.plane.bodies.held_bytes > 3400)

    refused.request(kit.CHAT, chat("x" * 1500))
    answer = await refused.answer()
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "replica_full", "1")
    assert "router.max_buffered_body_bytes" in answer.error["message"]
    assert await refused.closed()

    half_read.close()
    await kit.eventually(lambda: router.plane.bodies.held_bytes < 1700)
    later.request(kit.CHAT, chat("x" * 1500))
    await kit.eventually(lambda: len(intake.requests) == 2)
    gate.set()
    assert [(await client.answer()).status for client in (held, later)] == [200, 200]
    assert router.plane.bodies.held_bytes == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
async def test_a_body_is_released_when_its_answer_begins_fails_or_nobody_waits_for_it(
    fleet: StartFleet, path: str
) -> None:
    """Every other test here checks at its end that no body is left."""
    arrived = asyncio.Event()

    async def hang(talk: Talk) -> None:
        arrived.set()
        await talk.until_closed()

    _, _, router = await fleet(hang)
    gone, lost_at_once = await router.connect(), await router.connect()
    gone.request(path, chat("q"))
    gone.request(path, chat("waits behind the first"))
    gone.send(b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nhalf")
    lost_at_once.request(path, chat("q"))
    lost_at_once.reset()
    if path != "/x":
        await arrived.wait()
        assert router.plane.bodies.held_bytes > 0
    gone.reset()
    await kit.eventually(lambda: not router.state.connections and not router.state.tasks)
    assert router.plane.bodies.held_bytes == 0


async def test_connection_close_is_obeyed(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    for path, method, value in ((kit.CHAT, "POST", chat("q")), ("/x", "GET", None), (kit.CHAT, "OPTIONS", None)):
        client = await router.connect()
        client.request(path, value, method=method, headers="connection: close\r\n")
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.closed()


# methods -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE"])
async def test_other_methods_on_an_inference_path_are_refused_with_the_allowed_ones(
    fleet: StartFleet, method: str
) -> None:
    intake, _, router = await fleet()
    client = await router.connect()
    client.request(kit.CHAT, method=method)
    answer = await client.answer(bodiless=method == "HEAD")
    assert answer.status == 405 and answer.headers["allow"] == "POST, OPTIONS"
    if method != "HEAD":
        assert answer.error["code"] == "method_not_allowed"
    client.request(kit.CHAT, chat("still in step"))
    assert (await client.answer()).status == 200
    assert len(intake.requests) == 1


async def test_options_tells_what_is_allowed(fleet: StartFleet) -> None:
    _, _, router = await fleet(api_keys=("k",))
    client = await router.connect()
    client.request(kit.CHAT, method="OPTIONS")
    answer = await client.answer()
    assert answer.status == 204 and answer.headers["allow"] == "POST, OPTIONS"


async def test_connect_is_refused(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    client = await router.connect()
    client.send(b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n")
    assert (await client.answer()).status == 405
    assert await client.closed()


# what is no request --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: h\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: h\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(150)) + b"\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
         + 20 * (b"1000\r\n" + b"z" * 4096 + b"\r\n"), 413),
    ],
)  # fmt: skip
async def test_bad_input_gets_its_error_and_the_connection_closes(fleet: StartFleet, wire: bytes, status: int) -> None:
    intake, _, router = await fleet(max_body_bytes=65536)
    client = await router.connect()
    client.send(wire)
    answer = await client.answer()
    assert answer.status == status and answer.error["type"] == "invalid_request_error"
    assert answer.headers["connection"] == "close"
    assert await client.closed()
    assert not intake.requests


async def test_an_error_is_read_even_by_a_client_that_goes_on_sending(fleet: StartFleet) -> None:
    """Closing with unread input would reset the connection, and the answer would be lost with it."""
    _, _, router = await fleet(max_body_bytes=1024)
    client = await router.connect()
    client.send(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 50000000\r\n\r\n" % kit.CHAT.encode())
    for _ in range(100):
        client.send(b"z" * 10_000)
        await asyncio.sleep(0)
    assert (await client.answer()).status == 413
    client.close()
    await kit.eventually(lambda: not router.state.connections)


async def test_an_http2_preface_is_told_to_speak_http1(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    client = await router.connect()
    client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    assert await asyncio.wait_for(client.reader.read(), 5) == HTTP2_GOAWAY


async def test_the_routers_own_answers_are_dated_as_the_apps_are(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    router.state.default_headers = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
    client = await router.connect()
    for path, method in ((kit.CHAT, "GET"), (kit.CHAT, "OPTIONS"), ("/x", "GET"), (kit.CHAT, "POST")):
        client.request(path, method=method)
        assert (await client.answer()).headers["date"] == "Thu, 01 Jan 1970 00:00:00 GMT", (path, method)


async def test_an_offered_h2c_upgrade_is_answered_in_http1(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    client = await router.connect()
    client.request(kit.CHAT, chat("q"), headers="connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n")
    assert (await client.answer()).json() == {"echo": "q"}
    client.request(kit.CHAT, chat("again"))
    assert (await client.answer()).json() == {"echo": "again"}


# bodies --------------------------------------------------------------------------------------------------------
async def test_expect_100_continue_is_answered_before_the_body(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    client = await router.connect()
    body = orjson.dumps(chat("late"))
    for _ in range(2):
        head = f"POST {kit.CHAT} HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
        client.send(head.encode())
        assert (await client.head()).status == 100
        client.send(body)
        assert (await client.answer()).json() == {"echo": "late"}


async def test_a_refused_expectation_gets_the_refusal_instead(fleet: StartFleet) -> None:
    intake, _, router = await fleet(api_keys=("k",))
    client = await router.connect()
    client.send(b"POST %b HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n" % kit.CHAT.encode())
    assert (await client.answer()).status == 401
    assert await client.closed()
    assert not intake.requests


async def test_a_chunked_body_reaches_the_instance_with_its_length(fleet: StartFleet) -> None:
    _, instance, router = await fleet()
    client = await router.connect()
    body = orjson.dumps(chat("chunked"))
    client.send(b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % kit.CHAT.encode())
    for byte in body:
        client.send(b"1\r\n%c\r\n" % byte)
    client.send(b"0\r\n\r\n")
    assert (await client.answer()).json() == {"echo": "chunked"}
    assert instance.talks[0].headers["content-length"] == str(len(body))
    assert "transfer-encoding" not in instance.talks[0].headers


# deadlines -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "start", [b"POST /v1", b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{"]
)
async def test_a_request_that_does_not_come_in_time_gets_a_408(fleet: StartFleet, start: bytes) -> None:
    intake, _, router = await fleet(client_timeout_s=0.2)
    client = await router.connect()
    client.send(start)
    answer = await client.answer()
    assert answer.status == 408 and answer.error["code"] == "request_timeout"
    assert "within 0.2 s" in answer.error["message"] and "router.client_timeout_s" in answer.error["message"]
    assert await client.closed()
    assert not intake.requests


async def test_dripping_bytes_do_not_extend_the_time_for_a_request(fleet: StartFleet) -> None:
    _, _, router = await fleet(client_timeout_s=0.3)
    client = await router.connect()
    client.send(b"GET /x HTTP/1.1\r\nhost: h\r\nx: ")
    deadline = asyncio.get_running_loop().time() + 60
    while router.state.connections and not client.reader._buffer:  # type: ignore[attr-defined]
        assert asyncio.get_running_loop().time() < deadline
        client.send(b"y")
        await asyncio.sleep(0.02)
    assert (await client.answer()).status == 408


async def test_an_idle_connection_is_closed_without_a_word(fleet: StartFleet) -> None:
    _, _, router = await fleet(keep_alive_s=0.2)
    silent, used = await router.connect(), await router.connect()
    used.request(kit.CHAT, chat("q"))
    assert (await used.answer()).status == 200
    assert await silent.closed() and await used.closed()
    await kit.eventually(lambda: not router.state.connections)


async def test_an_answer_that_takes_longer_than_a_client_may_idle_is_not_cut(fleet: StartFleet) -> None:
    async def slow(talk: Talk) -> None:
        [connection] = router.state.connections
        connection.check_deadlines(asyncio.get_running_loop().time() + 3600)
        await talk.answer({"ok": 1})

    _, _, router = await fleet(slow)
    client = await router.connect()
    client.request(kit.CHAT, chat("q"))
    assert (await client.answer()).json() == {"ok": 1}
    await kit.eventually(lambda: router.state.total_requests == 1)
    [connection] = router.state.connections
    connection.check_deadlines(asyncio.get_running_loop().time() + 3600)
    assert await client.closed(), "idle for as long, it is closed"


# ends ----------------------------------------------------------------------------------------------------------
async def test_a_last_answer_that_nobody_reads_does_not_keep_its_connection(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def huge(talk: Talk) -> None:
        await talk.answer({"choices": ["x" * 8_000_000]})

    monkeypatch.setattr(client_module, "BUFFER_BYTES", 64 << 20)
    _, _, router = await fleet(huge, chunk_timeout_s=0.3)
    client = await router.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.request(kit.CHAT, chat("q"), headers="connection: close\r\n")
    await kit.eventually(lambda: router.state.total_requests == 1)
    assert router.state.connections
    await kit.eventually(lambda: not router.state.connections)


async def test_draining_closes_connections_behind_their_answers(fleet: StartFleet) -> None:
    draining = False
    _, _, router = await fleet(draining=lambda: draining)
    first, second = await router.connect(), await router.connect()
    for client in (first, second):
        client.request(kit.CHAT, chat("q"))
        assert "connection" not in (await client.answer()).headers
    draining = True
    first.request(kit.CHAT, chat("q"))
    second.request("/x", method="GET")
    for client in (first, second):
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.closed()


async def test_shutdown_lets_requests_finish_and_closes_the_idle(fleet: StartFleet) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await go.wait()
        await talk.end_stream()

    intake, _, router = await fleet(script)
    idle, busy = await router.connect(), await router.connect()
    busy.chat(stream=True)
    await busy.head()
    await kit.eventually(lambda: len(router.state.connections) == 2)
    for connection in list(router.state.connections):
        connection.shutdown()
    assert await idle.closed()
    await busy.chunk()
    go.set()
    assert await busy.chunk() == b"data: [DONE]\n\n" and await busy.chunk() == b""
    assert await busy.closed()
    assert intake.placed_request.outcome is Outcome.COMPLETED


async def test_an_idle_connection_keeps_no_shutdown_waiting_and_leaves_no_task(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    before, client = asyncio.all_tasks(), await router.connect()
    for n in range(2):
        client.request(kit.CHAT, chat(f"q{n}"))
        await client.answer()
    await kit.eventually(lambda: not router.state.tasks)
    serving = {task for task in asyncio.all_tasks() - before if task.get_coro().__name__ == "_serve"}
    assert len(serving) == 1

    client.close()

    await kit.eventually(lambda: all(task.done() for task in serving))
    await kit.eventually(lambda: not router.state.connections)


async def test_a_cancelled_task_breaks_its_connection_and_frees_the_instance(fleet: StartFleet) -> None:
    """uvicorn cancels what is left when the time for a graceful shutdown is over."""
    arrived = asyncio.Event()

    async def hang(talk: Talk) -> None:
        arrived.set()
        await talk.until_closed()

    intake, instance, router = await fleet(hang)
    client = await router.connect()
    client.chat()
    await arrived.wait()
    for task in list(router.state.tasks):
        task.cancel()
    assert await client.closed()
    await kit.eventually(lambda: instance.open == 0)
    assert intake.placed_request.finished == [(Outcome.CUT_OFF, None)]


async def test_what_is_cut_off_before_its_first_byte_is_answered_with_the_error(fleet: StartFleet) -> None:
    arrived = asyncio.Event()

    async def hang(talk: Talk) -> None:
        arrived.set()
        await talk.until_closed()

    intake, instance, router = await fleet(hang)
    sent, half_sent, _idle = [await router.connect() for _ in range(3)]
    sent.chat()
    half_sent.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
    await arrived.wait()
    await kit.eventually(lambda: len(router.state.connections) == 3)
    cut = [connection.cut_off(ENDING) for connection in list(router.state.connections)]
    assert sorted(cut) == [False, True, True]
    for client in (sent, half_sent):
        answer = await client.answer()
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "shutting_down", "1")
        assert answer.headers["connection"] == "close"
        assert await client.closed()
    await kit.eventually(lambda: instance.open == 0)
    assert intake.placed_request.finished == [(Outcome.CUT_OFF, None)]


async def test_a_held_request_that_is_cut_off_is_answered_with_the_error(fleet: StartFleet) -> None:
    intake, _, router = await fleet(gate=asyncio.Event())
    client = await router.connect()
    client.chat(stream=True)
    await kit.eventually(lambda: len(intake.requests) == 1)
    for connection in list(router.state.connections):
        connection.cut_off(ENDING)
    assert (await client.answer()).error["code"] == "shutting_down"
    assert await client.closed()
    assert intake.ended == [Outcome.CUT_OFF]


async def test_a_stream_that_is_cut_off_ends_with_an_error_event(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.until_closed()

    intake, instance, router = await fleet(script)
    client = await router.connect()
    client.chat(stream=True)
    await client.head()
    await client.chunk()
    for connection in list(router.state.connections):
        assert connection.cut_off(ENDING)
    event = await client.chunk()
    error = orjson.loads(event.removeprefix(b"data: "))["error"]
    assert error == {"message": ENDING.message, "type": "service_unavailable", "param": None, "code": "shutting_down"}
    assert await client.closed()
    await kit.eventually(lambda: instance.open == 0)
    assert intake.placed_request.outcome is Outcome.CUT_OFF


async def test_anthropics_clients_get_errors_as_anthropic_sends_them(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n')
        await talk.until_closed()

    _, _, router = await fleet(script, max_body_bytes=2048, max_buffered_body_bytes=2048)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "q"}]}

    client = await router.connect()
    client.send(b"POST /v1/messages HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 4096\r\n\r\n")
    assert (await client.answer()).json() == {
        "type": "error",
        "error": {
            "type": "request_too_large",
            "message": "the request body is over 2048 bytes; shorten it, or raise router.max_body_bytes",
        },
    }

    client = await router.connect()
    client.request("/v1/messages", body)
    await client.head()
    await client.chunk()
    for connection in list(router.state.connections):
        connection.cut_off(ENDING)
    name, _, data = (await client.chunk()).partition(b"\n")
    assert name == b"event: error"
    error = orjson.loads(data.removeprefix(b"data: "))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": ENDING.message}}


async def test_connections_over_the_limit_are_refused(fleet: StartFleet) -> None:
    _, _, router = await fleet(max_connections=1)
    first, second = await router.connect(), await router.connect()
    first.request(kit.CHAT, chat("q"))
    assert (await first.answer()).status == 200
    answer = await second.answer()
    assert answer.status == 429 and answer.error["code"] == "replica_full"
    assert "raise router.max_connections" in answer.error["message"]
    assert await second.closed()
    first.close()
    await kit.eventually(lambda: not router.state.connections)
    third = await router.connect()
    third.request(kit.CHAT, chat("q"))
    assert (await third.answer()).status == 200


async def test_closed_connections_leave_nothing_behind(fleet: StartFleet) -> None:
    _, _, router = await fleet()
    clients = [await router.connect() for _ in range(20)]
    for n, client in enumerate(clients):
        if n % 4 == 0:
            client.send(b"POST /v1")
        elif n % 4 == 1:
            client.request(kit.CHAT, chat("q"))
        elif n % 4 == 2:
            client.send(b"rubbish\r\n\r\n")
    await kit.eventually(lambda: len(router.state.connections) > 10)
    left = [weakref.ref(connection) for connection in router.state.connections]
    for client in clients:
        client.close()
    await kit.eventually(lambda: not router.state.connections and not router.state.tasks)
    router.plane.upstreams.close()
    await asyncio.sleep(0)
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []
