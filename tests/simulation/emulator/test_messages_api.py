"""Anthropic's messages, by the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import orjson
import pytest

from dualmap.simulation.emulator.instance import EmulatedInstance

MODEL = "qwen2.5-7b"
HELLO: Any = [{"role": "user", "content": "hello there"}]
WEATHER: Any = {
    "name": "get_weather",
    "strict": True,
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_message_is_answered(anthropic_client: anthropic.AsyncAnthropic) -> None:
    message = await anthropic_client.messages.create(
        model=MODEL, messages=HELLO, max_tokens=7, extra_headers={"x-request-id": "my-id"}
    )
    assert message.id == "chatcmpl-my-id"
    assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
    assert len(text_of(message)) == 28
    assert (message.usage.input_tokens, message.usage.output_tokens) == (16, 7)


async def test_a_message_streams_the_same_text(anthropic_client: anthropic.AsyncAnthropic) -> None:
    whole = await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=20)
    async with anthropic_client.messages.stream(model=MODEL, messages=HELLO, max_tokens=20) as stream:
        pieces = [piece async for piece in stream.text_stream]
        final = await stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 20


async def test_what_is_cached_is_counted_apart_from_other_input(anthropic_client: anthropic.AsyncAnthropic) -> None:
    system: Any = [{"type": "text", "text": "s" * 4000}]
    for cached in (0, 7 * 128):
        message = await anthropic_client.messages.create(model=MODEL, system=system, messages=HELLO, max_tokens=1)
        assert message.usage.cache_read_input_tokens == cached
    counted = await anthropic_client.messages.count_tokens(model=MODEL, system=system, messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens + cached


async def test_a_stop_sequence_ends_a_message_and_is_named(anthropic_client: anthropic.AsyncAnthropic) -> None:
    full = text_of(await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=40))
    stop = full[50:56]
    message = await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=40, stop_sequences=[stop])
    assert text_of(message) == full[: full.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_tool_is_used_when_it_must_be_streamed_or_not(
    anthropic_client: anthropic.AsyncAnthropic, choice: Any
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 100, "tools": [WEATHER], "tool_choice": choice}
    whole: Any = await anthropic_client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    assert (whole.content[0].type, whole.content[0].name) == ("tool_use", "get_weather")
    assert "city" in whole.content[0].input
    async with anthropic_client.messages.stream(**asked) as stream:
        final: Any = await stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[0].input == whole.content[0].input


async def test_a_tool_that_is_not_strict_may_be_used_by_what_is_no_object_which_is_refused(
    anthropic_client: anthropic.AsyncAnthropic,
) -> None:
    loose: Any = {**WEATHER, "strict": False}
    refused, used = 0, 0
    for number in range(24):
        messages: Any = [{"role": "user", "content": f"Hello {number}"}]
        try:
            answer: Any = await anthropic_client.messages.create(
                model=MODEL, messages=messages, max_tokens=100, tools=[loose], tool_choice={"type": "any"}
            )
            used += isinstance(answer.content[0].input, dict)
        except anthropic.BadRequestError:
            refused += 1

    assert refused and used and refused + used == 24


async def test_a_tool_s_use_that_is_cut_off_is_none(anthropic_client: anthropic.AsyncAnthropic) -> None:
    message = await anthropic_client.messages.create(
        model=MODEL, messages=HELLO, max_tokens=1, tools=[WEATHER], tool_choice={"type": "any"}
    )
    assert (message.stop_reason, message.content) == ("max_tokens", [])


async def test_tools_and_their_results_are_part_of_the_prompt(anthropic_client: anthropic.AsyncAnthropic) -> None:
    turns: Any = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
    ]
    plain = await anthropic_client.messages.count_tokens(model=MODEL, messages=HELLO)
    longer = await anthropic_client.messages.count_tokens(model=MODEL, messages=turns, tools=[WEATHER])
    assert longer.input_tokens > plain.input_tokens + 40


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"model": "nope"}, 404, "NotFoundError", "`nope` does not exist"),
        ({"messages": []}, 400, "BadRequestError", "empty conversation"),
        ({"max_tokens": 131_073}, 400, "BadRequestError", "cannot be greater than max_model_len"),
        ({"messages": [{"role": "user", "content": "x" * 4 * 131_073}]}, 400, "BadRequestError", "context length"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "nope"}},
            400,
            "BadRequestError",
            "'nope' is not found",
        ),
    ],
)
async def test_errors_have_anthropic_s_form(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, kind: str, message: str
) -> None:
    for stream in (False, True):
        asked = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "stream": stream, **body}
        answer = await http.post("/v1/messages", json=asked)
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "body.max_tokens"),
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"messages": None}, "body.messages"),
        ({"messages": [{"role": "x", "content": "a"}]}, "body.messages.0.role"),
        ({"messages": [{"role": "user"}]}, "body.messages.0.content"),
        ({"tools": [{"name": "a"}]}, "body.tools.0.input_schema"),
    ],
)
async def test_what_fails_validation_is_refused_in_openai_s_form_as_vllm_does(
    http: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/messages", json={"model": MODEL, "messages": HELLO, "max_tokens": 4, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_dying_engine_ends_a_stream_with_an_error_event_and_others_with_anthropic_s_error(
    emulator: EmulatedInstance, eventually: Any
) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        asked = {"model": MODEL, "messages": HELLO, "max_tokens": 90_000}
        asking = [
            asyncio.create_task(client.post("/v1/messages", json={**asked, "stream": stream}))
            for stream in (True, False)
        ]
        await eventually(lambda: emulator.generator.active == 2)
        emulator.die(abruptly=False, revive_after_s=None)
        streamed, plain = await asyncio.gather(*asking)
        refused = await client.post("/v1/messages", json=asked)
    name, data = streamed.text.strip().split("\n\n")[-1].split("\n")
    assert (streamed.status_code, name) == (200, "event: error")
    assert orjson.loads(data.removeprefix("data: "))["error"]["type"] == "internal_error"
    for answer in (plain, refused):
        assert (answer.status_code, answer.json()["type"]) == (500, "error")
