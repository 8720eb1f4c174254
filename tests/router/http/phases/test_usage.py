"""Answering: usage that the router asks for, or does not, and what the client sees of it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.tenants.directory import TenantDirectory
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.request.outcome import Outcome, Usage
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk
from tests.router.http.phases.answers import USAGE, USAGE_EVENT, StartFleet, whole_stream


async def test_a_streams_usage_is_asked_for_and_kept_from_a_client_that_did_not_ask(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        await talk.token("a")
        await talk.event(USAGE_EVENT)
        await talk.end_stream()

    intake, [instance], client = await fleet(script, must_be_asked=True)
    client.chat(stream=True)
    answer = await client.answer()
    assert orjson.loads(instance.talks[0].body)["stream_options"] == {"include_usage": True}
    assert answer.whole and b"usage" not in answer.body
    assert answer.body.endswith(b'"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n')
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    assert intake.placed_request.finished == [(Outcome.COMPLETED, Usage(prompt_tokens=9, cached_tokens=4))]


@pytest.mark.parametrize("cut", [1, 7, 50, 1000])
async def test_usage_is_taken_out_however_its_event_is_cut(fleet: StartFleet, cut: int) -> None:
    tokens = [b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text for text in (b"a", b'\\"usage\\":', b"c")]
    events = [*tokens, b"data: " + orjson.dumps(USAGE_EVENT) + b"\n\n", b"data: [DONE]\n\n"]

    async def script(talk: Talk) -> None:
        wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        wire += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
        for start in range(0, len(wire), cut):
            await talk.send(wire[start : start + cut])
            await asyncio.sleep(0)

    _, _, client = await fleet(script, must_be_asked=True)
    for _ in range(2):
        client.chat(stream=True)
        answer = await client.answer()
        assert answer.whole and answer.body == b"".join([*tokens, events[-1]])


def engine(*, forced: bool, continuous: bool = False, fingerprint: str | None = None) -> Any:
    """Streams as vLLM does: with usage where it is asked for or ``forced``, and the fingerprint in the last event."""

    async def script(talk: Talk) -> None:
        asked = (orjson.loads(talk.body).get("stream_options") or {}).get("include_usage", False)
        sends, beside = asked or forced, {"usage": {"prompt_tokens": 9}} if continuous and forced else {}
        last = {} if fingerprint is None else {"system_fingerprint": fingerprint}
        await talk.begin_stream()
        await talk.event({"choices": [{"index": 0, "delta": {"content": "a"}}], **beside})
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **beside}
        await talk.event(end if sends else {**end, **last})
        if sends:
            await talk.event({**USAGE_EVENT, **last})
        await talk.end_stream()

    return script


@pytest.mark.parametrize("continuous", [True, False])
async def test_usage_that_an_instance_sends_unasked_is_the_clients(fleet: StartFleet, continuous: bool) -> None:
    intake, [instance], client = await fleet(engine(forced=True, continuous=continuous), sends_unasked=True)
    for _ in range(3):
        client.chat(stream=True)
        answer = await client.answer()
        assert orjson.dumps(USAGE_EVENT) in answer.body
    assert all(b"stream_options" not in talk.body for talk in instance.talks)
    await kit.eventually(lambda: len(intake.placed_requests[-1].finished) == 1)
    assert intake.placed_requests[-1].finished[0][1] == Usage(prompt_tokens=9, cached_tokens=4)


async def test_an_instance_is_asked_for_usage_from_the_first_stream_on(fleet: StartFleet) -> None:
    intake, [instance], client = await fleet(engine(forced=False))
    bodies = []
    for _ in range(3):
        client.chat(stream=True)
        bodies.append((await client.answer()).body)
    assert [b"stream_options" in talk.body for talk in instance.talks] == [True, True, True]
    assert len(set(bodies)) == 1 and b"usage" not in bodies[0]
    await kit.eventually(lambda: all(placed.finished for placed in intake.placed_requests))
    used = [placed.finished[0][1] for placed in intake.placed_requests]
    assert used == [Usage(prompt_tokens=9, cached_tokens=4)] * 3


async def test_an_instance_that_counts_beside_its_choices_does_so_unasked_and_loses_no_byte(fleet: StartFleet) -> None:
    """vLLM whose operator forces usage after it was known as one that is asked."""
    _, [instance], client = await fleet(engine(forced=True, continuous=True), must_be_asked=True)
    for _ in range(2):
        client.chat(stream=True)
        assert orjson.dumps(USAGE_EVENT) in (await client.answer()).body
    assert [b"stream_options" in talk.body for talk in instance.talks] == [True, False]


async def test_an_instance_whose_connection_broke_is_asked_as_before(fleet: StartFleet) -> None:
    async def script(talk: Talk) -> None:
        if len(instance.talks) == 1:
            talk.reset()
        else:
            await engine(forced=False)(talk)

    intake, [instance], client = await fleet(script)
    client.chat(stream=True)
    assert (await client.answer()).status == 502
    for _ in range(2):
        client.chat(stream=True)
        await client.answer()
    assert [b"stream_options" in talk.body for talk in instance.talks] == [True] * 3
    await kit.eventually(lambda: all(placed.finished for placed in intake.placed_requests))
    assert intake.placed_requests[1].finished[0][1] == Usage(prompt_tokens=9, cached_tokens=4)


async def test_asking_for_usage_takes_no_fingerprint_from_the_client(fleet: StartFleet) -> None:
    bodies = []
    for asks in (False, True):
        how = {"ask_usage": asks}
        _, [instance], client = await fleet(engine(forced=False, fingerprint="vllm-0.32-tp1"), settings=how)
        client.chat(stream=True)
        bodies.append((await client.answer()).body)
        assert (b"stream_options" in instance.talks[0].body) is asks
    assert bodies[0] == bodies[1] and b'"system_fingerprint":"vllm-0.32-tp1"' in bodies[0]


@pytest.mark.parametrize("limit", ["tokens_per_minute", "requests_per_minute"])
@pytest.mark.parametrize("options", [{"include_usage": False}, {"continuous_usage_stats": True}, {}, None])
async def test_a_client_that_is_charged_tokens_cannot_say_that_its_stream_has_no_usage(
    start_instance: StartInstance, start_router: StartRouter, limit: str, options: Any
) -> None:
    instance = await start_instance(engine(forced=False))
    intake = kit.Intake([instance.url])
    key = TenantKeySettings(name="ci", key=SecretStr("acme-secret"))
    tenant = TenantSettings(name="acme", keys=(key,), limits={limit: 10_000})
    router = await start_router(intake, tenants=TenantDirectory((), [tenant]))
    client = await router.connect()
    message = {"role": "user", "content": "hi"}
    client.request(
        kit.CHAT,
        {"model": "m", "stream": True, "messages": [message], "stream_options": options},
        headers="x-api-key: acme-secret\r\n",
    )
    answer = await client.answer()

    assert answer.whole and b'"usage"' not in answer.body and b"data: [DONE]" in answer.body
    await kit.eventually(lambda: bool(intake.placed_request.finished))
    used = Usage(prompt_tokens=9, cached_tokens=4) if limit == "tokens_per_minute" else None
    assert intake.placed_request.finished == [(Outcome.COMPLETED, used)]


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
async def test_what_a_client_says_of_usage_itself_is_left_as_it_is(fleet: StartFleet, options: Any) -> None:
    _, [instance], client = await fleet(whole_stream)
    message = {"role": "user", "content": "hi"}
    body = orjson.dumps({"model": "m", "stream": True, "messages": [message], "stream_options": options})
    client.request(kit.CHAT, body)
    answer = await client.answer()
    assert instance.talks[0].body == body
    assert orjson.dumps({"choices": [], "usage": USAGE}) in answer.body


async def test_usage_is_not_asked_for_where_the_settings_say_so(fleet: StartFleet) -> None:
    _, [instance], client = await fleet(whole_stream, settings={"ask_usage": False})
    client.chat(stream=True)
    answer = await client.answer()
    assert b"stream_options" not in instance.talks[0].body and b"usage" in answer.body
