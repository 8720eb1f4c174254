"""Instances that lie: an answer with a good status that is none, and statuses that peers may not give."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http.kit import Talk
from tests.router.http.phases.answers import StartFleet, whole_answer, whole_stream


async def redirects(talk: Talk) -> None:
    await talk.answer({}, status=302, extra="location: http://elsewhere/\r\n")


async def wants_a_key(talk: Talk) -> None:
    await talk.answer({"error": {"message": "unauthorized", "code": 401}}, status=401)


async def knows_no_such_path(talk: Talk) -> None:
    await talk.answer({"detail": "Not Found"}, status=404)


async def nothing(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n")


async def nothing_in_chunks(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n")


async def no_content(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 204 No Content\r\n\r\n")


async def a_page(talk: Talk) -> None:
    page = b"<html><body>It works!</body></html>"
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))


async def an_error_under_200(talk: Talk) -> None:
    await talk.answer({"error": {"message": "out of memory", "code": 500}})


async def aborts(talk: Talk) -> None:
    await talk.answer({"object": "chat.completion", "choices": [{"message": {}, "finish_reason": "abort"}]})


async def aborts_at_once(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
    await talk.end_stream()


async def a_stream_of_nothing(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.send(b"0\r\n\r\n")


async def half_a_body(talk: Talk) -> None:
    await talk.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    talk.writer.close()


BEFORE_THE_FIRST_BYTE = [
    (redirects, FailureKind.STATUS),
    (wants_a_key, FailureKind.STATUS),
    (knows_no_such_path, FailureKind.STATUS),
    (nothing, FailureKind.NO_ANSWER),
    (nothing_in_chunks, FailureKind.NO_ANSWER),
    (no_content, FailureKind.NO_ANSWER),
    (a_page, FailureKind.NO_ANSWER),
    (an_error_under_200, FailureKind.STATUS),
    (aborts, FailureKind.ABORTED),
    (aborts_at_once, FailureKind.ABORTED),
    (a_stream_of_nothing, FailureKind.TRUNCATED),
    (half_a_body, FailureKind.CLOSED),
]


@pytest.mark.parametrize(("lie", "kind"), BEFORE_THE_FIRST_BYTE)
async def test_where_an_instance_lies_before_the_first_byte_another_one_answers(
    fleet: StartFleet, lie: Any, kind: FailureKind
) -> None:
    intake, _, client = await fleet(lie, whole_answer)
    client.chat()
    answer = await client.answer()
    assert (answer.status, answer.headers["x-dualmap-instance"]) == (200, "i1")
    assert [failure.kind for failure in intake.placed_request.failures] == [kind]
    assert intake.placed_request.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("refusal", "status"), [(redirects, 302), (wants_a_key, 401), (knows_no_such_path, 404), (a_page, 200)]
)
async def test_what_all_instances_say_reaches_the_client_as_it_came(
    fleet: StartFleet, refusal: Any, status: int
) -> None:
    _, instances, client = await fleet(refusal, refusal, refusal)
    client.chat()
    answer = await client.answer()
    assert answer.status == status
    assert answer.headers["x-dualmap-attempts"] == "3"
    assert answer.body and b"no instance could answer" not in answer.body
    if status == 302:
        assert answer.headers["location"] == "http://elsewhere/"
    assert [len(instance.talks) for instance in instances] == [1, 1, 1]


async def test_a_refusal_says_more_than_a_connection_that_is_refused_after_it(fleet: StartFleet) -> None:
    _, [_, dead], client = await fleet(knows_no_such_path, whole_answer)
    await dead.stop()
    client.chat()
    answer = await client.answer()
    assert answer.status == 404 and orjson.loads(answer.body) == {"detail": "Not Found"}


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_clients_own_error_is_asked_once(fleet: StartFleet, status: int) -> None:
    async def refuse(talk: Talk) -> None:
        await talk.answer({"error": {"message": "bad", "code": status}}, status=status)

    intake, [_, other], client = await fleet(refuse, whole_answer)
    client.chat()
    assert (await client.answer()).status == status
    assert not other.talks and intake.placed_request.outcome is Outcome.CLIENT_ERROR


async def test_an_answer_that_is_bytes_is_no_lie(fleet: StartFleet) -> None:
    async def embed(talk: Talk) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 3\r\n\r\n"
        await talk.send(head + b"\x00<h")

    _, [_, other], client = await fleet(embed, whole_answer)
    client.chat()
    assert (await client.answer()).body == b"\x00<h" and not other.talks


async def test_a_pause_that_an_instance_asks_for_is_read(fleet: StartFleet) -> None:
    async def busy(talk: Talk) -> None:
        await talk.answer({"error": {"code": 429}}, status=429, extra="retry-after: 17\r\n")

    intake, _, client = await fleet(busy, whole_answer)
    client.chat()
    assert (await client.answer()).status == 200
    assert [failure.pause_s for failure in intake.placed_request.failures] == [17.0]


async def test_a_stream_without_its_end_is_broken_off_and_held_against_its_instance(fleet: StartFleet) -> None:
    async def stop_short(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await asyncio.sleep(0.02)
        await talk.send(b"0\r\n\r\n")

    intake, [_, other], client = await fleet(stop_short, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert not answer.whole and b"the stream ended before the answer did" in answer.body
    assert [fault.kind for fault in intake.placed_request.faults] == [FailureKind.TRUNCATED]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED and not other.talks


async def test_a_stream_that_its_instance_aborts_is_held_against_it(fleet: StartFleet) -> None:
    async def abort(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await asyncio.sleep(0.02)
        await talk.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
        await talk.end_stream()

    intake, _, client = await fleet(abort)
    client.chat(stream=True)
    answer = await client.answer()
    assert not answer.whole and b"the instance aborted the answer" in answer.body
    assert [fault.kind for fault in intake.placed_request.faults] == [FailureKind.ABORTED]
    assert intake.placed_request.outcome is Outcome.UPSTREAM_FAILED
