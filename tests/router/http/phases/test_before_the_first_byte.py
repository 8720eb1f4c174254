"""Dispatched, prefilling: an instance that fails before the first byte costs the client nothing."""

from __future__ import annotations

import math
import socket
import struct
from typing import Any

import pytest

from dualmap.router.errors import NoInstanceError
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http import kit
from tests.router.http.kit import Script, StartInstance, StartRouter, Talk
from tests.router.http.phases.answers import StartFleet, whole_answer, whole_stream


async def close_silently(talk: Talk) -> None:
    talk.writer.close()


async def reset(talk: Talk) -> None:
    talk.reset()


async def die_after_head(talk: Talk) -> None:
    await talk.begin_stream()
    talk.reset()


async def die_in_first_event(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.send(b'40\r\ndata: {"choices"')
    talk.reset()


async def unavailable(talk: Talk) -> None:
    await talk.answer({"error": {"message": "busy"}}, status=503)


async def internal_error(talk: Talk) -> None:
    await talk.answer({"error": {"message": "engine dead"}}, status=500)


async def too_many(talk: Talk) -> None:
    await talk.answer({"error": {"message": "later"}}, status=429, extra="retry-after: 7\r\n")


async def error_event_first(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.event({"error": {"message": "engine dead", "type": "InternalServerError", "code": 500}})
    await talk.end_stream()


async def not_http(talk: Talk) -> None:
    await talk.send(b"SSH-2.0-OpenSSH_9.6\r\n")


async def endless_head(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(80)))


async def smuggled_head(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc")


async def unknown_coding(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n")


async def status_below_100(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 099 X\r\n\r\n")


async def status_over_599(talk: Talk) -> None:
    await talk.answer(status=600)


async def empty_stream(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.send(b"0\r\n\r\n")


async def unavailable_and_stuck(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 503 X\r\ncontent-length: 100\r\n\r\nhalf")
    talk.writer.close()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (close_silently, FailureKind.CLOSED),
        (reset, FailureKind.CLOSED),
        (die_after_head, FailureKind.CLOSED),
        (die_in_first_event, FailureKind.CLOSED),
        (unavailable, FailureKind.STATUS),
        (internal_error, FailureKind.STATUS),
        (too_many, FailureKind.STATUS),
        (unavailable_and_stuck, FailureKind.STATUS),
        (error_event_first, FailureKind.STATUS),
        (not_http, FailureKind.PROTOCOL),
        (endless_head, FailureKind.PROTOCOL),
        (smuggled_head, FailureKind.PROTOCOL),
        (unknown_coding, FailureKind.PROTOCOL),
        (status_below_100, FailureKind.PROTOCOL),
        (status_over_599, FailureKind.PROTOCOL),
        (empty_stream, FailureKind.TRUNCATED),
    ],
)
async def test_an_instance_that_fails_before_the_first_byte_costs_the_client_nothing(
    fleet: StartFleet, script: Script, kind: FailureKind
) -> None:
    intake, [bad, good], client = await fleet(script, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 200 and answer.whole and answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.headers["x-dualmap-instance"] == "i1" and answer.headers["x-dualmap-attempts"] == "2"
    assert "x-dualmap-expected-ttft-ms" not in answer.headers, "it was of the first try"
    placed = intake.placed_request
    assert [failure.kind for failure in placed.failures] == [kind]
    assert placed.outcome is Outcome.COMPLETED and len(placed.finished) == 1
    assert len(bad.talks) == len(good.talks) == 1
    assert bad.talks[0].body == good.talks[0].body
    if kind is not FailureKind.STATUS and script is not empty_stream:  # those may serve again
        await kit.eventually(lambda: bad.open == 0)


async def test_a_port_where_nobody_listens_is_a_connect_failure(
    start_instance: StartInstance, start_router: StartRouter
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead_url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        good = await start_instance(whole_answer)
        intake = kit.Intake([dead_url, good.url])
        client = await (await start_router(intake)).connect()
        client.chat()
        assert (await client.answer()).status == 200
    assert intake.placed_request.failures[0].kind is FailureKind.CONNECT


async def test_when_every_instance_fails_the_last_ones_own_error_is_the_answer(fleet: StartFleet) -> None:
    intake, _, client = await fleet(reset, too_many)
    client.chat()
    answer = await client.answer()
    assert answer.status == 429 and answer.json()["error"]["message"] == "later"
    assert answer.headers["retry-after"] == "7" and answer.headers["x-dualmap-attempts"] == "2"
    assert intake.placed_request.finished == [(Outcome.UPSTREAM_FAILED, None)]
    client.chat()
    assert (await client.answer()).status == 429, "the connection is still good"


async def test_an_error_event_that_nobody_could_avoid_becomes_an_error_answer(fleet: StartFleet) -> None:
    _, _, client = await fleet(error_event_first)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 500 and answer.json()["error"]["message"] == "engine dead"
    assert answer.headers["content-type"] == "application/json"


async def test_when_every_instance_is_gone_the_answer_is_a_502_in_openais_form(fleet: StartFleet) -> None:
    intake, _, client = await fleet(reset, close_silently)
    client.chat(headers="x-request-id: r1\r\n")
    answer = await client.answer()
    assert answer.status == 502 and answer.error["code"] == "upstream_failed"
    assert answer.headers["x-request-id"] == "r1"
    assert intake.placed_request.finished == [(Outcome.UPSTREAM_FAILED, None)]


async def test_a_request_that_nobody_answers_is_refused_by_the_id_that_the_fleet_gave_it(fleet: StartFleet) -> None:
    intake, _, client = await fleet(reset, renamed="r1-2")
    client.chat(headers="x-request-id: r1\r\n")
    answer = await client.answer()
    assert answer.status == 502 and answer.headers["x-request-id"] == "r1-2"
    intake.refusal = NoInstanceError("nobody is ready")
    intake.refusal.request_id = "r1-3"
    client.chat(headers="x-request-id: r1\r\n")
    answer = await client.answer()
    assert answer.status == 503 and answer.headers["x-request-id"] == "r1-3"


@pytest.fixture
def died_unseen(start_instance: StartInstance, start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A router with a kept connection that its instance has reset, which it does not see before it writes again; and
    the instance, which goes on listening or does not."""
    monkeypatch.setattr("dualmap.router.http.sending.IDLE_DEATH_S", math.inf)  # however slow this machine is

    async def start(*, listens: bool) -> Any:
        instance = await start_instance(whole_answer)
        intake = kit.Intake([instance.url])
        router = await start_router(intake)
        client = await router.connect()
        client.chat()
        assert (await client.answer()).status == 200
        [kept] = router.plane.upstreams._idle[instance.url]
        kept._transport.pause_reading()
        linger = struct.pack("ii", 1, 0)
        instance.talks[0].writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        instance.talks[0].reset()
        await kit.eventually(lambda: instance.open == 0)
        if not listens:
            await instance.stop()
        return intake, instance, client

    return start


async def test_a_kept_connection_that_died_unseen_is_replaced_without_a_retry(died_unseen: Any) -> None:
    intake, instance, client = await died_unseen(listens=True)
    client.chat()
    assert (await client.answer()).status == 200
    assert (instance.connections, len(instance.talks)) == (2, 2)
    assert [placed.failures for placed in intake.placed_requests] == [[], []]


async def test_a_kept_connection_that_broke_and_cannot_be_replaced_may_have_carried_work(died_unseen: Any) -> None:
    intake, _, client = await died_unseen(listens=False)
    client.chat()
    assert (await client.answer()).status == 502
    [failure] = intake.placed_requests[1].failures
    assert failure.kind is FailureKind.CLOSED and failure.wasted_work, "the retry budget must be asked"


async def test_a_request_that_was_computed_on_a_kept_connection_is_not_sent_to_the_same_instance_again(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.http.sending.IDLE_DEATH_S", 0.0)  # however soon it broke, it was not at once

    async def answer_once_per_connection(talk: Talk) -> None:
        await talk.answer({"ok": 1})
        await talk.reader.readuntil(b"\r\n\r\n")  # the next request came and is being computed
        talk.reset()

    intake, [killed, other], client = await fleet(answer_once_per_connection, whole_answer)
    for _ in range(2):
        client.chat()
        assert (await client.answer()).status == 200
    assert len(killed.talks) == 1 and len(other.talks) == 1
    assert [failure.kind for failure in intake.placed_requests[1].failures] == [FailureKind.CLOSED]


@pytest.mark.parametrize("listens", [True, False])
async def test_accepted_then_closed_is_no_death_while_the_port_accepts(fleet: StartFleet, listens: bool) -> None:
    async def close(talk: Talk) -> None:
        if not listens:
            instances[0].close_port()
        talk.reset()

    intake, instances, client = await fleet(close, whole_answer)
    client.chat()
    assert (await client.answer()).status == 200
    [failure] = intake.placed_request.failures
    assert failure.kind is FailureKind.CLOSED
    assert failure.engine_died is not listens


async def test_a_hanging_instance_is_left_after_the_first_byte_timeout(fleet: StartFleet) -> None:
    async def hang(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.until_closed()

    intake, [stuck, _], client = await fleet(hang, whole_stream, settings={"first_byte_timeout_s": 0.2})
    client.chat(stream=True)
    assert (await client.answer()).whole
    assert intake.placed_request.failures[0].kind is FailureKind.TIMEOUT
    await kit.eventually(lambda: stuck.open == 0)


async def test_an_answer_that_does_not_stream_is_not_computed_again_after_its_timeout(fleet: StartFleet) -> None:
    async def compute(talk: Talk) -> None:
        await talk.until_closed()

    intake, [stuck, other], client = await fleet(compute, whole_answer, settings={"first_byte_timeout_s": 0.2})
    client.chat()
    answer = await client.answer()
    assert answer.status == 504 and answer.error["code"] == "upstream_timeout"
    assert "router.first_byte_timeout_s" in answer.error["message"]
    assert intake.placed_request.finished == [(Outcome.TIMED_OUT, None)] and not other.talks
    await kit.eventually(lambda: stuck.open == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_hanging_instance_is_left_when_the_fleet_takes_it_down(
    fleet: StartFleet, down_view: Any, stream: bool
) -> None:
    async def hang(talk: Talk) -> None:
        if stream:
            await talk.begin_stream()
        await talk.until_closed()

    intake, [stuck, _], client = await fleet(hang, whole_stream if stream else whole_answer)
    client.chat(stream=stream)
    await kit.eventually(lambda: stuck.talks)

    intake.pool.loss_notifier.check(down_view)

    answer = await client.answer()
    assert answer.whole and answer.headers["x-dualmap-instance"] == "i1"
    assert intake.placed_request.failures[0].kind is FailureKind.DOWN
    await kit.eventually(lambda: stuck.open == 0)
    assert not intake.pool.loss_notifier._listeners


async def test_an_error_answer_that_never_ends_is_not_waited_for(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.answers.machine.ERROR_BODY_S", 0.1)

    async def half_an_error(talk: Talk) -> None:
        await talk.send(b"HTTP/1.1 503 X\r\ncontent-length: 100\r\n\r\nhalf")
        await talk.until_closed()

    intake, _, client = await fleet(half_an_error, whole_answer, settings={"chunk_timeout_s": 1.0})
    client.chat()
    assert (await client.answer()).status == 200
    assert (intake.placed_request.failures[0].kind, intake.placed_request.failures[0].status) == (
        FailureKind.STATUS,
        503,
    )


async def test_the_time_for_the_whole_request_ends_all_tries(fleet: StartFleet) -> None:
    async def hang(talk: Talk) -> None:
        await talk.until_closed()

    intake, [_, other], client = await fleet(hang, whole_answer, settings={"total_timeout_s": 0.2})
    client.chat()
    answer = await client.answer()
    assert answer.status == 504 and answer.error["code"] == "upstream_timeout"
    assert "router.total_timeout_s" in answer.error["message"]
    assert intake.placed_request.finished == [(Outcome.TIMED_OUT, None)] and not other.talks
