"""Streams of every form that engines may write: long first events, mixed line ends, comments."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from dualmap.router.answers.machine import MAX_HELD_BYTES
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http import kit
from tests.router.http.kit import Client, Instance, Script, StartInstance, StartRouter, Talk

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
COMMENT = b": the engine is busy\n\n"


StartFleet = Callable[..., Awaitable[tuple[kit.Intake, list[Instance], Client]]]


@pytest.fixture
def fleet(start_instance: StartInstance, start_router: StartRouter) -> StartFleet:
    """A router in front of scripted instances, and a connected client."""

    async def start(*scripts: Script, **settings: Any) -> Any:
        instances = [await start_instance(script) for script in scripts]
        intake = kit.Intake([instance.url for instance in instances])
        router = await start_router(intake, **settings)
        return intake, instances, await router.connect()

    return start


def streaming(*chunks: bytes, ends: bool = True) -> Script:
    """A script that sends these chunks, and then ends its answer or breaks it."""

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        for chunk in chunks:
            await talk.chunk(chunk)
        if ends:
            await talk.send(b"0\r\n\r\n")
        else:
            talk.writer.close()

    return script


def in_pieces(rng: random.Random, stream: bytes) -> list[bytes]:
    pieces, most = [], rng.choice([1, 5, 50, 500])
    while stream:
        size = rng.randint(1, most)
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


# what is too long to be held -----------------------------------------------------------------------------------
@pytest.mark.parametrize("requests_usage", [True, False])
@pytest.mark.parametrize("cut", [1 << 10, 1 << 20])
async def test_a_first_event_of_any_length_passes_and_is_the_first_token(
    fleet: StartFleet, requests_usage: bool, cut: int
) -> None:
    """vLLM sends such for return_token_ids, and for echo with log probabilities."""
    ids = orjson.dumps([*range(60_000)])
    event = b'data: {"choices":[{"index":0,"text":"a","prompt_token_ids":%b}]}\n\n' % ids
    assert len(event) > MAX_HELD_BYTES
    stream = event + TOKEN + DONE
    intake, _, client = await fleet(streaming(*(stream[at : at + cut] for at in range(0, len(stream), cut))))
    client.chat(stream=True, requests_usage=requests_usage)
    answer = await client.answer()
    assert answer.status == 200 and answer.whole and answer.body == stream
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.COMPLETED)
    assert intake.placed_request.first_tokens == 1 and intake.placed_request.failures == []


async def test_the_client_has_a_long_first_event_before_it_is_whole(fleet: StartFleet) -> None:
    go = asyncio.Event()
    long = b"data: " + b"x" * MAX_HELD_BYTES

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.chunk(long)
        await go.wait()
        await talk.chunk(b"\n\n")
        await talk.end_stream()

    _, _, client = await fleet(script)
    client.chat(stream=True, requests_usage=True)
    assert (await client.head()).status == 200
    assert await client.chunk() == long, "it passes before its end has come"
    go.set()


async def test_what_is_no_whole_event_at_the_end_of_a_stream_reaches_the_client(fleet: StartFleet) -> None:
    intake, _, client = await fleet(streaming(b'{"choices":[]}\n'))
    client.chat(stream=True, requests_usage=True)
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, b'{"choices":[]}\n')
    assert intake.placed_request.failures == []


# what passes unread ------------------------------------------------------------------------------------------
COMPRESSED = gzip.compress(ROLE + TOKEN + USAGE + DONE)


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
async def test_a_compressed_answer_passes_as_it_is_and_is_not_asked_again_for_what_could_not_be_removed(
    fleet: StartFleet, content_type: str
) -> None:
    bodies = []

    async def script(talk: Talk) -> None:
        bodies.append(talk.body)
        await talk.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-encoding: gzip\r\n"
            f"content-length: {len(COMPRESSED)}\r\n\r\n".encode()
            + COMPRESSED
        )

    intake, _, client = await fleet(script)
    for _ in range(3):
        client.chat(stream=True)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, COMPRESSED)
    assert [b"stream_options" in body for body in bodies] == [True, False, False]
    assert all(not placed.failures for placed in intake.placed_requests)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-ndjson", ""])
@pytest.mark.parametrize("cut", [1, 1 << 20])
async def test_an_event_stream_under_another_type_passes_as_it_comes(
    fleet: StartFleet, content_type: str, cut: int
) -> None:
    go = asyncio.Event()
    field = f"content-type: {content_type}\r\n" if content_type else ""

    async def script(talk: Talk) -> None:
        await talk.send(f"HTTP/1.1 200 OK\r\n{field}transfer-encoding: chunked\r\n\r\n".encode())
        for at in range(0, len(TOKEN), cut):
            await talk.chunk(TOKEN[at : at + cut])
        await go.wait()
        if b"include_usage" in talk.body:
            await talk.chunk(USAGE)
        await talk.chunk(DONE)
        await talk.send(b"0\r\n\r\n")

    intake, _, client = await fleet(script)
    go.set()
    if content_type == "application/x-ndjson":  # not read here: the first stream shows that nothing can be removed
        client.chat(stream=True)
        assert (await client.answer()).body == TOKEN + USAGE + DONE
    for _ in range(2):
        client.chat(stream=True)
        assert (await client.answer()).body == TOKEN + DONE, "what the router asks for is removed as from any other"
    go.clear()
    client.chat(stream=True, requests_usage=True)
    assert (await client.head()).status == 200
    received = b""
    while received != TOKEN:
        received += await client.chunk()
    go.set()
    assert [await client.chunk(), await client.chunk()] == [USAGE, DONE]
    assert all(not placed.failures for placed in intake.placed_requests)


# ends --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "last"),
    [
        (b"/v1/chat/completions", DONE),
        (b"/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
        (
            b"/v1/responses",
            b'event: response.completed\ndata: {"response": {"id": "r"}, "type": "response.completed"}\n\n',
        ),
    ],
)
@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
async def test_a_stream_that_came_to_its_end_is_whole_however_small_its_reads_are(
    fleet: StartFleet, path: bytes, last: bytes, cut: int
) -> None:
    stream = TOKEN + last + b": bye\n\n" * 40

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        for at in range(0, len(stream), cut):
            await talk.chunk(stream[at : at + cut])
            await asyncio.sleep(0)
        await talk.send(b"0\r\n\r\n")

    intake, _, client = await fleet(script)
    body = b'{"model":"m","stream":true,"input":"hi","messages":[{"role":"user","content":"hi"}],"stream_options":{}}'
    client.send(b"POST %b HTTP/1.1\r\nhost: f\r\ncontent-length: %d\r\n\r\n%b" % (path, len(body), body))
    answer = await client.answer()
    assert (answer.whole, answer.body) == (True, stream)
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.COMPLETED)


# line ends -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(12))
async def test_a_stream_passes_byte_for_byte_whatever_its_line_ends_and_however_it_is_cut(
    fleet: StartFleet, seed: Any
) -> None:
    rng = random.Random(seed)
    ends = [[b"\n"], [b"\r\n"], [b"\r"], [b"\n", b"\r\n", b"\r"]]
    streams = []

    def written(event: bytes, choice: list[bytes]) -> bytes:
        first, second = rng.choice(choice), rng.choice(choice)
        return event.strip() + first + (b"\r\n" if (first, second) == (b"\r", b"\n") else second)

    async def script(talk: Talk) -> None:
        choice = rng.choice(ends)
        events = [written(event, choice) for event in [COMMENT, ROLE, COMMENT, TOKEN, TOKEN, COMMENT, DONE]]
        asked = b"include_usage" in talk.body
        sent = [*events[:-1], written(USAGE, choice), events[-1]] if asked else events
        streams.append((b"".join(events), b"".join(sent)))
        await talk.begin_stream()
        for piece in in_pieces(rng, b"\xef\xbb\xbf" + b"".join(sent)):
            await talk.chunk(piece)
        await talk.send(b"0\r\n\r\n")

    intake, _, client = await fleet(script)
    for requests_usage in (True, False, False, True):
        client.chat(stream=True, requests_usage=requests_usage)
        answer = await client.answer()
        assert answer.whole
        assert answer.body == b"\xef\xbb\xbf" + streams[-1][requests_usage]
    assert [placed.first_tokens for placed in intake.placed_requests] == [1] * 4
    assert all(not placed.failures for placed in intake.placed_requests)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n", b"\r\r\n", b"\n\r", b"\r\n\r"])
async def test_the_first_token_is_seen_when_its_event_ends_whatever_the_line_ends(
    fleet: StartFleet, end: bytes
) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE.strip() + end)
        await go.wait()
        await talk.chunk(TOKEN.strip() + end)
        await talk.until_closed()

    intake, _, client = await fleet(script)
    client.chat(stream=True, requests_usage=True)
    await client.head()
    assert b"assistant" in await client.chunk()
    assert intake.placed_request.first_tokens == 0
    go.set()
    assert b'"a"' in await client.chunk()
    await kit.eventually(lambda: intake.placed_request.first_tokens == 1)


# comments ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("comment", [b":\n\n", b": ping\n", b": ping\r\n\r\n", b"\xef\xbb\xbf: ping\n\n", b"\n"])
@pytest.mark.parametrize("requests_usage", [True, False])
async def test_a_comment_before_the_first_event_passes_at_once_and_is_no_first_token(
    fleet: StartFleet, comment: bytes, requests_usage: bool
) -> None:
    go = asyncio.Event()

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.chunk(comment)
        await go.wait()
        await talk.chunk(TOKEN)
        await talk.end_stream()

    intake, _, client = await fleet(script)
    client.chat(stream=True, requests_usage=requests_usage)
    assert (await client.head()).status == 200
    assert await client.chunk() == comment
    assert intake.placed_request.first_tokens == 0
    go.set()
    assert (await client.chunk()).startswith(TOKEN)
    await kit.eventually(lambda: intake.placed_request.first_tokens == 1)


async def begin_and_fail(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.chunk(COMMENT)
    await talk.event({"error": {"message": "engine dead", "code": 500}})
    await talk.send(b"0\r\n\r\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("requests_usage", [True, False])
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (streaming(COMMENT, ends=False), FailureKind.CLOSED),
        (streaming(COMMENT, COMMENT, TOKEN[:9], ends=False), FailureKind.CLOSED),
        (streaming(COMMENT), FailureKind.TRUNCATED),
        (begin_and_fail, FailureKind.STATUS),
    ],
)
async def test_another_instance_answers_in_a_stream_of_which_only_comments_have_come(
    fleet: StartFleet, script: Script, kind: FailureKind, requests_usage: bool, version: str
) -> None:
    intake, _, client = await fleet(script, streaming(COMMENT, ROLE, TOKEN, DONE))
    options = {"stream_options": {"include_usage": True}} if requests_usage else {}
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **options})
    client.send(
        b"POST %b HTTP/%b\r\nhost: f\r\ncontent-length: %d\r\n\r\n" % (kit.CHAT.encode(), version.encode(), len(body))
    )
    client.send(body)
    answer = await client.answer()
    assert answer.status == 200 and answer.whole
    assert answer.body.removeprefix(COMMENT).removeprefix(COMMENT).removeprefix(COMMENT) == ROLE + TOKEN + DONE
    placed = intake.placed_request
    await kit.eventually(lambda: placed.outcome is Outcome.COMPLETED)
    assert [failure.kind for failure in placed.failures] == [kind] and placed.first_tokens == 1


async def test_a_client_that_has_comments_alone_gets_an_error_event_when_no_instance_is_left(fleet: StartFleet) -> None:
    intake, _, client = await fleet(streaming(COMMENT, ends=False), streaming(COMMENT, ends=False))
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.status == 200 and not answer.whole
    assert b'data: {"error":' in answer.body.removeprefix(COMMENT + COMMENT)
    await kit.eventually(lambda: intake.placed_request.outcome is Outcome.UPSTREAM_FAILED)


async def test_comments_do_not_keep_a_hung_engine_from_its_timeout(fleet: StartFleet) -> None:
    async def hung(talk: Talk) -> None:
        await talk.begin_stream()
        while True:
            await talk.chunk(COMMENT)
            await asyncio.sleep(0.02)

    intake, _, client = await fleet(hung, streaming(TOKEN, DONE), first_byte_timeout_s=0.3)
    client.chat(stream=True)
    answer = await client.answer()
    assert answer.whole and answer.body.endswith(COMMENT + TOKEN + DONE)
    assert [failure.kind for failure in intake.placed_request.failures] == [FailureKind.TIMEOUT]
