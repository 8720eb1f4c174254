"""How streams of ``/v1/responses`` that fail end, as OpenAI's client and one that reads ``response.failed`` see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import orjson
import pytest

from dualmap.router.answers.last_words import last_words
from dualmap.router.answers.sse import EventSplitter, event_object
from dualmap.router.errors import RateLimitError, RouterError, ShuttingDownError, UpstreamError
from tests.router.http.kit import Intake, StartInstance, StartRouter, Talk

RESPONSES = "/v1/responses"
BODY = {"model": "m", "input": "hi", "stream": True}
BEGUN = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress", "output": []}
ITEM = {"type": "message", "id": "msg_1", "role": "assistant", "status": "in_progress", "content": []}
PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
FAILED = {"code": "server_error", "message": "the engine ran out of words"}


def event(number: int, kind: str, **fields: Any) -> bytes:
    payload = {"type": kind, "sequence_number": number, **fields}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(payload))


BEGINNING = (
    event(0, "response.created", response=BEGUN)
    + event(1, "response.output_item.added", output_index=0, item=ITEM)
    + event(2, "response.content_part.added", **PLACE, part={"type": "output_text", "text": "", "annotations": []})
    + event(3, "response.output_text.delta", **PLACE, delta="one ", logprobs=[])
)


async def breaks_off(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.chunk(BEGINNING)
    talk.reset()


async def fails(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.chunk(BEGINNING + event(4, "response.failed", response={**BEGUN, "status": "failed", "error": FAILED}))
    await talk.end_stream()


async def errs(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.chunk(BEGINNING + b'data: {"error":{"message":"the engine ran out of words","code":500}}\n\n')
    await talk.end_stream()


async def events_of(router: Any) -> list[dict[str, Any]]:
    """The events that a client gets."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30) as client,
        client.stream("POST", f"http://127.0.0.1:{router.port}{RESPONSES}", json=BODY) as answer,
    ):
        splitter, found = EventSplitter(1 << 20), []
        try:
            async for data in answer.aiter_bytes():
                found += [event_object(each) for each in splitter.feed(data)]
        except httpx.RemoteProtocolError:
            pass  # the end of the framing is missing
    return [each for each in found if each is not None]


HOW = pytest.mark.parametrize("how", ["off", "text"])


@HOW
@pytest.mark.parametrize("script", [breaks_off, errs])
async def test_every_event_of_a_response_has_a_type_and_a_number_and_the_last_one_says_that_it_failed(
    start_router: StartRouter, start_instance: StartInstance, script: Callable[[Talk], Any], how: str
) -> None:
    instance = await start_instance(script)
    router = await start_router(Intake([instance.url]), continue_streams=how)

    events = await events_of(router)

    if script is errs and how == "off":  # the engine's own bytes pass as they are
        assert events[-1]["error"]["message"] == FAILED["message"]
        return
    assert [each["type"] for each in events[-2:]] == ["error", "response.failed"]
    assert [each["sequence_number"] for each in events] == list(range(6))
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["error"]["message"] == events[-2]["message"] == events[-2]["error"]["message"]


@HOW
async def test_the_engines_own_failed_response_is_passed_on(
    start_router: StartRouter, start_instance: StartInstance, how: str
) -> None:
    instance = await start_instance(fails)
    router = await start_router(Intake([instance.url]), continue_streams=how)

    *_, last = await events_of(router)

    assert (last["type"], last["sequence_number"]) == ("response.failed", 4)
    assert last["response"]["error"] == FAILED
    assert last["response"]["id"] == "resp_1"


@HOW
async def test_openais_client_raises_where_a_response_breaks_off(
    start_router: StartRouter, start_instance: StartInstance, how: str
) -> None:
    instance = await start_instance(breaks_off)
    router = await start_router(Intake([instance.url]), continue_streams=how)
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{router.port}/v1", api_key="x", max_retries=0, http_client=httpx.AsyncClient()
    ) as client:
        with pytest.raises(openai.APIError, match="broke"):
            async for _ in await client.responses.create(model="m", input="hi", stream=True):
                pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UpstreamError("x"), "server_error"),
        (ShuttingDownError("x"), "server_error"),
        (RateLimitError("x", counted="tokens"), "rate_limit_exceeded"),
    ],
)
def test_codes_of_failed_responses_are_openais(error: RouterError, code: str) -> None:
    words = last_words(RESPONSES, error, b'data: {"sequence_number": 7, "delta": "\\"sequence_number\\": 99"}\n\n')
    first, last = (event_object(each) or {} for each in EventSplitter(1 << 20).feed(words))

    assert (first["sequence_number"], last["sequence_number"]) == (8, 9)
    assert last["response"]["error"] == {"code": code, "message": "x"}
    openai.types.responses.ResponseErrorEvent.model_validate(first)


def test_streams_of_other_apis_end_as_before() -> None:
    assert last_words("/v1/chat/completions", UpstreamError("x")).startswith(b'data: {"error":{"message":"x"')
    assert last_words("/v1/messages", UpstreamError("x")).startswith(b'event: error\ndata: {"type":"error"')
