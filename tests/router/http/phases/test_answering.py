"""Answering: what an instance says reaches the client as it came."""

from __future__ import annotations

import asyncio
import tracemalloc

import orjson
import pytest

from dualmap.scheduling.request.outcome import FailureKind, Outcome, Usage
from tests.router.http import kit
from tests.router.http.kit import Talk
from tests.router.http.phases.answers import USAGE, USAGE_EVENT, StartFleet, whole_answer, whole_stream


async def test_an_answer_passes_with_the_fleets_fields(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer)
    client.chat(headers="x-request-id: mine\r\ntraceparent: 00-aa-bb-01\r\nauthorization: Bearer own\r\n")
    answer = await client.answer()
    assert answer.status == 200 and answer.json()["object"] == "chat.completion"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-dualmap-instance"] == "i0"
    assert answer.headers["x-dualmap-cached-tokens"] == "128"
    assert answer.headers["x-dualmap-attempts"] == "1"
    assert answer.headers["x-dualmap-expected-ttft-ms"] == "250.0"
    sent = instance.talks[0].headers
    assert sent["x-request-id"] == "mine"
    assert sent["traceparent"] == "00-aa-bb-01"
    assert sent["authorization"] == "Bearer own"
    assert sent["host"] == instance.url.removeprefix("http://")
    assert intake.placed_request.finished == [(Outcome.COMPLETED, Usage(prompt_tokens=9, cached_tokens=4))]


async def test_a_stream_passes_as_it_comes_and_its_first_token_is_content(fleet: StartFleet) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.role()
        await go.wait()
        await talk.token("a")
        await talk.event({"choices": [], "usage": USAGE})
        await talk.end_stream()

    intake, _, client = await fleet(script)
    client.chat(stream=True, requests_usage=True)
    assert (await client.head()).headers["transfer-encoding"] == "chunked"
    assert b"assistant" in await client.chunk()
    assert intake.placed_request.first_tokens == 0, "a role is no token"
    go.set()
    rest = await client.chunk()
    assert b'"a"' in rest
    await kit.eventually(lambda: intake.placed_request.first_tokens == 1)
    while chunk := await client.chunk():
        rest += chunk
    assert b"usage" in rest and rest.endswith(b"\n\ndata: [DONE]\n\n")
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.COMPLETED, Usage(prompt_tokens=9, cached_tokens=4))]
    assert intake.placed_request.first_tokens == 1


@pytest.mark.parametrize("requests_usage", [True, False])
async def test_a_stream_cut_anywhere_passes_unchanged(fleet: StartFleet, requests_usage: bool) -> None:
    async def script(talk: Talk) -> None:
        wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        for text in ("a", "b"):
            event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()
            wire += b"%x\r\n%b\r\n" % (len(event), event)
        wire += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        for byte in wire:
            await talk.send(bytes([byte]))
            await asyncio.sleep(0)

    intake, _, client = await fleet(script)
    for _ in range(2):
        client.chat(stream=True, requests_usage=requests_usage)
        answer = await client.answer()
        assert answer.whole
        assert answer.body == b"".join(
            [
                b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
                b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
                b"data: [DONE]\n\n",
            ]
        )
    assert [placed.first_tokens for placed in intake.placed_requests] == [1, 1]


async def test_a_stream_of_announced_length_keeps_all_of_its_bytes(fleet: StartFleet) -> None:
    events = b"data: " + orjson.dumps(USAGE_EVENT) + b"\n\n" + b"data: [DONE]\n\n"

    async def script(talk: Talk) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
        await talk.send(head % len(events) + events)

    _, _, client = await fleet(script)
    client.chat(stream=True)
    assert (await client.answer()).body == events


async def test_a_client_error_of_the_instance_passes_and_is_not_tried_elsewhere(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"error": {"message": "prompt too long", "code": 400}}, status=400)

    intake, [_, other], client = await fleet(script, whole_answer)
    client.chat()
    answer = await client.answer()
    assert answer.status == 400 and answer.json()["error"]["message"] == "prompt too long"
    assert intake.placed_request.outcome is Outcome.CLIENT_ERROR and not other.talks


async def test_a_client_error_inside_a_stream_is_the_clients_own(fleet: StartFleet) -> None:
    """vLLM checks sampling parameters when the stream has begun."""

    async def refuse_late(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.event({"error": {"message": "top_k must be -1", "type": "BadRequestError", "code": 400}})
        await talk.end_stream()

    intake, [_, other], client = await fleet(refuse_late, whole_stream)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 200 and b"top_k must be -1" in answer.body and answer.body.endswith(b"[DONE]\n\n")
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.CLIENT_ERROR, None)] and not other.talks


@pytest.mark.parametrize("status", [501, 505])
async def test_what_no_instance_can_do_is_not_tried_elsewhere(fleet: StartFleet, status: int) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"error": {"message": "best_of is not supported", "code": status}}, status=status)

    intake, [_, other], client = await fleet(script, whole_answer)
    client.chat()
    answer = await client.answer()
    assert answer.status == status and answer.json()["error"]["message"] == "best_of is not supported"
    assert intake.placed_request.outcome is Outcome.CLIENT_ERROR and not other.talks


async def test_informational_answers_are_skipped(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await talk.answer({"ok": 1})

    _, _, client = await fleet(script)
    client.chat()
    answer = await client.answer()
    assert answer.json() == {"ok": 1} and "link" not in answer.headers


async def test_an_answer_that_ends_with_the_connection_is_framed_for_the_client(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.send(b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n")
        await talk.send(b'{"a":')
        await talk.send(b"1}")
        talk.writer.close()

    intake, _, client = await fleet(script)
    for _ in range(2):
        client.chat()
        answer = await client.answer()
        assert answer.whole and answer.json() == {"a": 1}
    assert {placed.outcome for placed in intake.placed_requests} == {Outcome.COMPLETED}


async def test_an_http_10_client_gets_a_stream_without_chunks(fleet: StartFleet) -> None:
    _, _, client = await fleet(whole_stream)
    body = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]})
    client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (kit.CHAT.encode(), len(body), body))
    answer = await client.answer()
    assert answer.headers["connection"] == "close" and "transfer-encoding" not in answer.headers
    assert answer.body.startswith(b"data: {") and answer.body.endswith(b"data: [DONE]\n\n")


async def test_an_answer_that_has_begun_keeps_nothing_of_its_request_in_memory(fleet: StartFleet) -> None:
    prompt_bytes, go = 8 << 20, asyncio.Event()

    async def script(talk: Talk) -> None:
        talk.body = b""
        await talk.begin_stream()
        await talk.token("a")
        await go.wait()
        await talk.end_stream()

    _, _, client = await fleet(script, settings={"max_body_bytes": 2 * prompt_bytes})
    tracemalloc.start()
    try:
        messages = [{"role": "user", "content": "x" * prompt_bytes}]
        client.request(kit.CHAT, {"model": "m", "stream": True, "messages": messages})
        del messages
        await client.head()
        await client.chunk()
        assert tracemalloc.get_traced_memory()[0] < prompt_bytes / 2
    finally:
        tracemalloc.stop()
    go.set()
    assert (await client.chunk()) == b"data: [DONE]\n\n"


async def test_bytes_behind_the_end_of_an_answer_never_reach_a_client(fleet: StartFleet) -> None:
    async def two_answers(talk: Talk) -> None:
        await talk.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )

    intake, _, client = await fleet(two_answers, whole_answer)
    client.chat()
    answer = await client.answer()
    assert answer.json()["object"] == "chat.completion"
    assert intake.placed_request.failures[0].kind is FailureKind.PROTOCOL


async def test_line_ends_behind_an_answer_never_reach_a_client(fleet: StartFleet) -> None:
    async def sloppy(talk: Talk) -> None:
        body = b"2\r\n{}\r\n0\r\n\r\n"
        await talk.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"\r\n" * 1000)

    _, [instance], client = await fleet(sloppy)
    for _ in range(2):
        client.chat()
        assert (await client.answer()).json() == {}
    assert instance.connections == 2, "a connection out of step is used again"


async def test_line_ends_before_an_answer_never_reach_a_client(fleet: StartFleet) -> None:
    async def sloppy(talk: Talk) -> None:
        await talk.send(b"\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n\r\n\r\n")
        await talk.answer({"ok": 1})

    _, _, client = await fleet(sloppy)
    client.chat()
    assert (await client.answer()).json() == {"ok": 1}
