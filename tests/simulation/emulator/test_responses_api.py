"""OpenAI's responses, by the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from dualmap.simulation.emulator.instance import EmulatedInstance

MODEL = "qwen2.5-7b"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def test_a_response_is_a_message_of_the_wanted_length(openai_client: openai.AsyncOpenAI) -> None:
    response = await openai_client.responses.create(model=MODEL, input="hello there", max_output_tokens=7)
    assert len(response.output_text) == 28
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (16, 7)


async def test_without_a_limit_a_response_completes(openai_client: openai.AsyncOpenAI) -> None:
    response = await openai_client.responses.create(model=MODEL, input="hello there")
    assert response.status == "completed"
    assert response.output_text


async def test_a_response_streams_the_same_text_in_numbered_events(openai_client: openai.AsyncOpenAI) -> None:
    whole = await openai_client.responses.create(model=MODEL, input="hello there", max_output_tokens=20)
    stream: Any = await openai_client.responses.create(
        model=MODEL, input="hello there", max_output_tokens=20, stream=True
    )
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.output_tokens == 20


async def test_a_conversation_goes_on_where_its_prefix_is_cached(openai_client: openai.AsyncOpenAI) -> None:
    turns: Any = [{"role": "user", "content": "a" * 4000}]
    await openai_client.responses.create(model=MODEL, input=turns, max_output_tokens=1)
    turns += [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b" * 40}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": [{"type": "input_text", "text": "c" * 40}]},
    ]
    again = await openai_client.responses.create(model=MODEL, input=turns, max_output_tokens=1)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == 7 * 128


async def test_a_response_has_all_fields_that_its_type_requires(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": "a" * 4000, "max_output_tokens": 1}
    usages = []
    for _ in range(2):
        answer = await http.post("/v1/responses", json=body)
        usage = Response.model_validate(answer.json()).usage  # the client's own reading lets fields be missing
        assert usage is not None
        usages.append((usage.input_tokens_details.cache_write_tokens, usage.input_tokens_details.cached_tokens))
    assert usages == [(7 * 128, 0), (0, 7 * 128)]


async def test_a_function_is_called_when_it_must_be_streamed_or_not(openai_client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "hello", "tools": [WEATHER]}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        whole: Any = (await openai_client.responses.create(**asked, tool_choice=choice)).output[0]  # type: ignore[call-overload]
        assert (whole.type, whole.name) == ("function_call", "get_weather")
        assert "city" in json.loads(whole.arguments)
    stream: Any = await openai_client.responses.create(**asked, tool_choice="required", stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == whole.arguments == events[-1].response.output[0].arguments


async def test_a_response_can_be_json_of_a_schema(openai_client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": schema}}
    response = await openai_client.responses.create(model=MODEL, input="hello", text=text)
    assert isinstance(json.loads(response.output_text)["age"], int)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "body.input"),
        ({"input": 5}, 400, "body.input"),
        ({"input": []}, 400, "empty conversation"),
        ({"input": [{"content": "x"}]}, 400, "role"),
        ({"input": "x", "model": "nope"}, 404, "`nope` does not exist"),
        ({"input": "x", "previous_response_id": "resp_1"}, 404, "'resp_1' not found"),
        ({"input": "x", "background": True}, 400, "background mode"),
        ({"input": "x", "tool_choice": "required"}, 400, "must be specified with 'tools'"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, 400, "not found in"),
        ({"input": "x", "text": {"format": {"type": "nope"}}}, 400, "body.text.format.type"),
        ({"input": "x", "max_output_tokens": 0}, 400, "at least 1"),
    ],
)
async def test_bad_requests_are_refused(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, message: str
) -> None:
    answer = await http.post("/v1/responses", json={"model": MODEL, **body})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_no_response_is_kept(openai_client: openai.AsyncOpenAI) -> None:
    for call in (openai_client.responses.retrieve, openai_client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="resp_1"):
            await call("resp_1")


async def test_the_stream_of_a_dying_engine_breaks_off(emulator: EmulatedInstance, eventually: Any) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        body = {"model": MODEL, "input": "x", "max_output_tokens": 90_000, "stream": True}
        asking = asyncio.create_task(client.post("/v1/responses", json=body))
        await eventually(lambda: emulator.generator.active == 1)
        emulator.die(abruptly=False, revive_after_s=None)
        with pytest.raises(httpx.RemoteProtocolError):
            await asking


async def test_responses_are_kept_where_the_store_is_enabled(start_emulator: Any) -> None:
    url = (await start_emulator(store_responses=True)).url
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=3)
        assert await client.responses.retrieve(made.id) == made
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await client.responses.cancel(made.id)
        unkept = await client.responses.create(model=MODEL, input="hello", max_output_tokens=3, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


async def test_a_stored_response_is_continued(start_emulator: Any) -> None:
    url = (await start_emulator(store_responses=True)).url
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

        async def ask(**fields: Any) -> Any:
            return await client.responses.create(model=MODEL, input="hello there " * 20, max_output_tokens=3, **fields)

        first = await ask()
        second = await ask(previous_response_id=first.id)
        third = await ask(previous_response_id=second.id)
        tokens = [each.usage.input_tokens for each in (first, second, third)]
        assert tokens[2] - tokens[1] == tokens[1] - tokens[0] > 3
        unkept = await ask(store=False)
        with pytest.raises(openai.NotFoundError):
            await ask(previous_response_id=unkept.id)
