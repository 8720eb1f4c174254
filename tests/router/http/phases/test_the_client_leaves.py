"""The client leaves, or closes its half of the connection, in any phase."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.tenants.directory import TenantDirectory
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.outcome import Outcome, Usage
from tests.router.http import kit
from tests.router.http.kit import PlacedRequest, Script, StartInstance, StartRouter, Talk
from tests.router.http.phases.answers import StartFleet, whole_answer, whole_stream

USER = {"role": "user", "content": "hi"}
TENANT = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),))


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_a_client_that_leaves_a_stream_frees_the_instance(fleet: StartFleet, leave: str) -> None:
    gone = asyncio.Event()

    async def endless(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.until_closed()
        gone.set()

    intake, [instance], client = await fleet(endless)
    client.chat(stream=True)
    await client.head()
    await client.chunk()
    getattr(client, leave)()
    await asyncio.wait_for(gone.wait(), 60.0)
    assert intake.placed_request.finished == [(Outcome.CLIENT_GONE, None)]
    await kit.eventually(lambda: instance.open == 0)


async def test_a_client_that_leaves_before_the_first_byte_frees_the_instance(fleet: StartFleet) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def slow(talk: Talk) -> None:
        arrived.set()
        await talk.until_closed()
        gone.set()

    intake, _, client = await fleet(slow)
    client.chat()
    await arrived.wait()
    client.close()
    await asyncio.wait_for(gone.wait(), 60.0)
    assert intake.placed_request.finished == [(Outcome.CLIENT_GONE, None)]


async def test_a_client_that_leaves_while_held_is_forgotten(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(whole_answer, gate=asyncio.Event())
    client.chat()
    await kit.eventually(lambda: bool(intake.requests))
    client.close()
    await kit.eventually(lambda: intake.ended == [Outcome.CLIENT_GONE], within_s=1.0)
    assert not instance.talks and not intake.placed_requests


async def test_a_client_that_leaves_while_its_answer_flows_leaves_no_trace_in_the_log(
    start_instance: StartInstance, start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    connected = asyncio.Barrier(40)  # a flood may keep others from being connected in time

    async def flood(talk: Talk) -> None:
        await connected.wait()
        await talk.begin_stream()
        while True:
            for _ in range(5):
                await talk.token("word " * 400)
            await asyncio.sleep(0)

    instance = await start_instance(flood)
    intake = kit.Intake([instance.url])
    router = await start_router(intake)

    async def leave() -> None:
        client = await router.connect()
        client.chat(stream=True)
        await client.head()
        client.close()

    await asyncio.gather(*[leave() for _ in range(40)])
    await kit.eventually(lambda: all(placed.finished for placed in intake.placed_requests))
    assert [placed.outcome for placed in intake.placed_requests] == [Outcome.CLIENT_GONE] * 40
    assert not caplog.records


@pytest.mark.parametrize("script", [whole_answer, whole_stream])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_closed_its_half_gets_its_whole_answer(
    fleet: StartFleet, script: Script, begun: bool
) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(talk: Talk) -> None:
        if begun:
            await talk.begin_stream()
            await talk.token("a")
        arrived.set()
        await go_on.wait()
        if begun:
            await talk.token("b")
            await talk.end_stream()
        else:
            await script(talk)

    intake, _, client = await fleet(slow)
    client.chat(stream=True)
    await arrived.wait()
    if begun:
        await kit.eventually(lambda: intake.placed_request.first_tokens == 1)
    client.writer.write_eof()
    await asyncio.sleep(0.3)  # until it was asked more than once whether it is there
    go_on.set()
    raw = await asyncio.wait_for(client.reader.read(), 10)
    answer = raw.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or b'"usage"' in answer
    assert (b"\r\nconnection: close\r\n" in answer) is not begun
    assert intake.placed_request.outcome is Outcome.COMPLETED


async def test_requests_pipelined_before_a_client_closed_its_half_are_all_answered(fleet: StartFleet) -> None:
    _, _, client = await fleet(whole_answer)
    for _ in range(3):
        client.chat()
    client.writer.write_eof()
    raw = await asyncio.wait_for(client.reader.read(), 10)
    assert raw.count(b"HTTP/1.1 200 OK") == 3 and raw.count(b"connection: close") == 1


async def test_half_a_request_is_not_waited_for_once_its_client_closed_its_half(fleet: StartFleet) -> None:
    _, _, client = await fleet(whole_answer)
    client.chat()
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
    client.writer.write_eof()
    raw = await asyncio.wait_for(client.reader.read(), 5.0)
    assert raw.count(b"HTTP/1.1 200 OK") == 1


async def test_a_client_of_http_10_that_closes_its_half_counts_as_gone(fleet: StartFleet) -> None:
    """It cannot be asked whether it is there."""
    intake, _, client = await fleet(whole_answer, gate=asyncio.Event())
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % (kit.CHAT.encode(), len(body)) + body)
    await kit.eventually(lambda: bool(intake.requests))
    client.writer.write_eof()
    await kit.eventually(lambda: intake.ended == [Outcome.CLIENT_GONE], within_s=1.0)
    assert await client.closed()


def _sse(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _chunk(text: str, usage: dict[str, int] | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return {"id": "x", "choices": [choice], **({} if usage is None else {"usage": usage})}


async def _leaves_after(
    fleet: StartFleet, path: str, body: dict[str, Any], events: list[bytes], continues: str = "tokens"
) -> PlacedRequest:
    """A client that leaves once it has all of these events, of a stream that does not end."""

    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        for event in events:
            await talk.chunk(event)
        await talk.until_closed()

    tenants = TenantDirectory((), [TENANT])  # answers of other clients are not charged, and so not counted
    intake, _, client = await fleet(script, settings={"continue_streams": continues, "tenants": tenants})
    client.request(path, {"model": "m", "stream": True, **body}, headers="x-api-key: acme-secret\r\n")
    await client.head()
    got = b""
    while not got.endswith(events[-1]):
        got += await client.chunk()
    client.close()
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    return intake.placed_request


@pytest.mark.parametrize("continues", ["off", "tokens"])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_that_is_left_is_counted_by_its_events(
    fleet: StartFleet, continues: str, options: dict[str, Any]
) -> None:
    """Streams that may go on elsewhere pass by other code than those that may not; both pass the native relay."""
    role = {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
    events = [_sse(value) for value in (role, *[_chunk(f"word {at}") for at in range(300)])]
    placed = await _leaves_after(fleet, kit.CHAT, {"messages": [USER], **options}, events, continues)

    assert placed.finished == [(Outcome.CLIENT_GONE, None)]
    assert placed.counted == Counted(300)


async def test_the_usage_in_a_stream_that_is_left_counts(fleet: StartFleet) -> None:
    events = [
        _sse(_chunk("word", {"prompt_tokens": 9, "completion_tokens": 4 * at, "total_tokens": 9 + 4 * at}))
        for at in range(1, 101)
    ]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [USER], "stream_options": options}
    placed = await _leaves_after(fleet, kit.CHAT, body, events)

    assert placed.finished == [(Outcome.CLIENT_GONE, Usage(9, None, 400))]
    assert placed.counted == Counted(100)


async def test_messages_and_responses_that_are_left_are_counted_by_their_deltas(fleet: StartFleet) -> None:
    def named(name: str, **fields: Any) -> bytes:
        return f"event: {name}\n".encode() + _sse({"type": name, **fields})

    text = {"type": "text_delta", "text": 'event: content_block_delta\n"content_block_delta"'}
    message = [
        named("message_start", message={"stop_reason": None, "usage": {"input_tokens": 3}}),
        named("content_block_start", index=0),
        *[named("content_block_delta", delta=text, index=0) for _ in range(40)],
    ]
    response = [
        named("response.created", response={"status": "in_progress"}),
        named("response.output_item.added"),
        *[named("response.reasoning_text.delta", delta=".delta") for _ in range(7)],
        *[named("response.output_text.delta", delta="x") for _ in range(40)],
    ]
    placed = await _leaves_after(fleet, "/v1/messages", {"max_tokens": 99, "messages": [USER]}, message)
    assert placed.finished == [(Outcome.CLIENT_GONE, Usage(3))] and placed.counted == Counted(40)
    placed = await _leaves_after(fleet, "/v1/responses", {"input": "hi"}, response)
    assert placed.counted == Counted(47)
