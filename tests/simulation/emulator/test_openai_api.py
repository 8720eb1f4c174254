"""Chats and completions, what the official client may ask of them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

MODEL = "qwen2.5-7b"
HELLO: Any = [{"role": "user", "content": "hello there"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "strict": True}}


async def refusal(client: httpx.AsyncClient, path: str, **body: Any) -> str:
    answer = await client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


# number of answers --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("absent", ["n", "stop", "stream", "tools", "tool_choice", "logprobs", "response_format"])
async def test_what_is_null_is_as_good_as_absent(http: httpx.AsyncClient, absent: str) -> None:
    chat = {"model": MODEL, "messages": HELLO, "max_tokens": 2, absent: None}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    completion = {"model": MODEL, "prompt": "x", "max_tokens": 2, absent: None}
    assert (await http.post("/v1/completions", json=completion)).status_code == 200


async def test_a_message_of_the_assistant_that_is_continued_is_the_end_of_the_prompt(http: httpx.AsyncClient) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "four"}]
    body = {"model": MODEL, "messages": begun, "max_tokens": 2, "continue_final_message": True}

    answer = await http.post("/v1/chat/completions", json={**body, "add_generation_prompt": False})

    assert answer.json()["usage"]["prompt_tokens"] == 16 + 1
    assert "add_generation_prompt" in await refusal(http, "/v1/chat/completions", **body)


async def test_several_answers_differ_and_their_prompt_counts_once(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 15)


async def test_several_answers_stream_side_by_side(openai_client: openai.AsyncOpenAI) -> None:
    whole = await openai_client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, n=2)
    stream = await openai_client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, ends = ["", ""], []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [0, 1]
    assert usage is not None and usage.completion_tokens == 12


async def test_a_batch_of_prompts_gets_an_answer_each_as_if_asked_alone(openai_client: openai.AsyncOpenAI) -> None:
    prompts = ["once", "upon a time", "there was"]
    batch = await openai_client.completions.create(model=MODEL, prompt=prompts, max_tokens=3)
    alone = [await openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=3) for prompt in prompts]
    assert [choice.text for choice in batch.choices] == [answer.choices[0].text for answer in alone]
    assert [choice.index for choice in batch.choices] == [0, 1, 2]
    assert batch.usage is not None
    assert (batch.usage.prompt_tokens, batch.usage.completion_tokens) == (1 + 3 + 3, 9)


async def test_a_batch_of_token_ids_streams(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.completions.create(
        model=MODEL, prompt=[[5, 6], [7, 8, 9]], max_tokens=4, n=2, stream=True
    )
    texts: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert sorted(texts) == [0, 1, 2, 3]
    assert {len(text) for text in texts.values()} == {16}


# where answers end --------------------------------------------------------------------------------------------
async def test_a_stop_string_ends_the_answer_before_it_streamed_or_not(openai_client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 40}
    full = (await openai_client.chat.completions.create(**asked)).choices[0].message.content or ""
    stop = full[61:67]
    expected = full[: full.index(stop)]
    whole = await openai_client.chat.completions.create(**asked, stop=["not said", stop])
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].model_extra is not None
    assert whole.choices[0].model_extra["stop_reason"] == stop
    assert whole.usage is not None and whole.usage.completion_tokens < 40
    stream = await openai_client.chat.completions.create(**asked, stop=stop, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == expected


async def test_ignore_eos_goes_on_to_the_end_of_the_context(start_emulator: Any) -> None:
    emulator = await start_emulator(max_model_len=500)
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        body = {"messages": HELLO, "ignore_eos": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == 500
    assert answer["choices"][0]["finish_reason"] == "length"


# echo and log-probabilities -----------------------------------------------------------------------------------
async def test_echo_repeats_the_prompt_before_the_answer(openai_client: openai.AsyncOpenAI) -> None:
    plain = await openai_client.completions.create(model=MODEL, prompt="grüße dich", max_tokens=3)
    echoed = await openai_client.completions.create(model=MODEL, prompt="grüße dich", max_tokens=3, echo=True)
    assert echoed.choices[0].text == "grüße dich" + plain.choices[0].text
    alone = await openai_client.completions.create(model=MODEL, prompt="grüße dich", max_tokens=0, echo=True)
    assert alone.choices[0].text == "grüße dich"
    stream = await openai_client.completions.create(
        model=MODEL, prompt="grüße dich", max_tokens=3, echo=True, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == echoed.choices[0].text


async def test_a_completion_s_log_probabilities_are_those_of_its_tokens(openai_client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "once upon", "max_tokens": 3, "logprobs": 2}
    answer = await openai_client.completions.create(**asked, echo=True)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.text_offset and found.token_logprobs and found.top_logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset == [0, 4, 8, 9, 13, 17]
    assert found.token_logprobs[0] is None  # nothing predicts the first token of a prompt
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert [len(top) for top in found.top_logprobs[1:]] == [2] * 5
    assert all(token in top for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True))
    stream = await openai_client.completions.create(**asked, echo=True, stream=True)
    tokens: list[str] = []
    offsets: list[int] = []
    async for chunk in stream:
        part = chunk.choices[0].logprobs
        tokens += (part.tokens or []) if part else []
        offsets += (part.text_offset or []) if part else []
    assert (tokens, offsets) == (found.tokens, found.text_offset)


async def test_a_chat_s_log_probabilities_have_as_many_alternatives_as_wanted(
    openai_client: openai.AsyncOpenAI,
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "logprobs": True}
    answer = await openai_client.chat.completions.create(**asked, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content
    for token in logprobs.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert [top.logprob for top in token.top_logprobs] == [token.logprob, token.logprob - 0.5]
    none = await openai_client.chat.completions.create(**asked)
    assert none.choices[0].logprobs is not None and none.choices[0].logprobs.content is not None
    assert [token.top_logprobs for token in none.choices[0].logprobs.content] == [[], [], []]


# structured output and tools ----------------------------------------------------------------------------------
async def test_json_mode_and_schema_are_kept_streamed_or_not(openai_client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 7}}, "required": ["age"]}
    as_object: Any = {"type": "json_object"}
    by_schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    anything = await openai_client.chat.completions.create(model=MODEL, messages=HELLO, response_format=as_object)
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    person = await openai_client.chat.completions.create(model=MODEL, messages=HELLO, response_format=by_schema)
    assert json.loads(person.choices[0].message.content or "")["age"] >= 7
    assert person.choices[0].finish_reason == "stop"
    stream = await openai_client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format=by_schema, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == person.choices[0].message.content


async def test_json_that_is_longer_than_wanted_is_cut_off(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(
        model=MODEL, messages=HELLO, response_format={"type": "json_object"}, max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == '{"answer'[:8]


async def test_vllm_s_structured_outputs_choose_among_texts(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": HELLO, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("choice", "name", "finish_reason"),
    [
        ("required", "get_weather", "tool_calls"),
        ({"type": "function", "function": {"name": "get_time"}}, "get_time", "stop"),
    ],
)
async def test_a_tool_is_called_when_it_must_be_streamed_or_not(
    openai_client: openai.AsyncOpenAI, choice: Any, name: str, finish_reason: str
) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    whole = (await openai_client.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == finish_reason
    assert whole.message.tool_calls is not None and len(whole.message.tool_calls) == 1
    call: Any = whole.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == name
    assert isinstance(arguments, dict) and ("city" in arguments) == (name == "get_weather")
    streamed, names = "", []
    async for chunk in await openai_client.chat.completions.create(**asked, stream=True):
        last = chunk.choices[0]
        for part in last.delta.tool_calls or []:
            assert part.function is not None
            names += [part.function.name] if part.function.name else []
            streamed += part.function.arguments or ""
    assert (names, streamed, last.finish_reason) == ([name], call.function.arguments, finish_reason)


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_where_the_choice_is_the_model_s_it_calls_no_tool(openai_client: openai.AsyncOpenAI, choice: Any) -> None:
    answer = await openai_client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, tools=[WEATHER], tool_choice=choice
    )
    assert answer.choices[0].message.tool_calls is None
    assert len(answer.choices[0].message.content or "") == 16


# what is refused ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set"),
        ({"tools": []}, "must not be an empty array"),
        ({"tools": [WEATHER], "tool_choice": "nope"}, "Invalid value for `tool_choice`: nope!"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "does not match any of the specified `tools`",
        ),
        ({"tools": [{"type": "function"}]}, "body.tools.0.function.name"),
        ({"response_format": {"type": "nope"}}, "body.response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "the 'json_schema' field must be provided"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}}},
            "Grammar error: Invalid type: wat",
        ),
        ({"structured_outputs": {"regex": "[0-9]"}}, "structured_outputs.regex is not emulated"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not emulated"),
        ({"use_beam_search": True}, "use_beam_search is not emulated"),
        ({"echo": True}, "echo is not emulated"),
        ({"top_logprobs": 2}, "`logprobs` must be set to true"),
        ({"logprobs": True, "top_logprobs": 21}, "greater than max allowed: 20"),
        ({"logprobs": True, "top_logprobs": -2}, "must be a positive value or -1"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens must be less than or equal to max_tokens=4"),
    ],
)
async def test_what_a_chat_may_not_ask_for_is_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], message: str
) -> None:
    assert message in await refusal(http, "/v1/chat/completions", messages=HELLO, **body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"suffix": "x"}, "suffix is only supported"),
        ({"logprobs": 21}, "greater than max allowed: 20"),
        ({"logprobs": -1}, "greater than max allowed: 20"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds is not emulated"),
    ],
)
async def test_what_a_completion_may_not_ask_for_is_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], message: str
) -> None:
    assert message in await refusal(http, "/v1/completions", prompt="x", **body)
