"""Chat and completions: fields, order of chunks, finish reasons, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.server import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]
LONG: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


async def test_a_chat_is_answered(server: Server) -> None:
    answer = await server.post(CHAT, messages=HELLO, **LONG)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", server.model)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["message"]["role"], choice["finish_reason"]) == (0, "assistant", "length")
    assert choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


async def test_a_completion_is_answered(server: Server) -> None:
    answer = await server.post(COMPLETIONS, prompt="once upon a time", **LONG)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"] and choice["finish_reason"] == "length"


async def test_a_request_id_becomes_the_answers(server: Server) -> None:
    body = {"model": server.model, "messages": HELLO, "max_tokens": 1}
    answer = await server.http.post(CHAT, json=body, headers={"x-request-id": "conformance-1"})
    assert answer.json()["id"] == "chatcmpl-conformance-1"


async def test_a_streamed_chat_starts_with_the_role_and_ends_with_a_reason_usage_and_done(server: Server) -> None:
    events = await server.stream(CHAT, messages=HELLO, stream_options={"include_usage": True}, **LONG)
    *chunks, (_, last), done = events
    assert done == ("", "[DONE]")
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    choices = [chunk["choices"][0] for _, chunk in chunks]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert any(choice["delta"].get("content") for choice in choices)
    assert {chunk["object"] for _, chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for _, chunk in chunks}) == 1


async def test_a_streamed_completion_has_no_usage_unless_asked_for(server: Server) -> None:
    events = await server.stream(COMPLETIONS, prompt="once upon a time", **LONG)
    assert events[-1] == ("", "[DONE]")
    choices = [chunk["choices"][0] for _, chunk in events[:-1]]
    assert choices[-1]["finish_reason"] == "length" and all("text" in choice for choice in choices)
    assert not any(chunk.get("usage") for _, chunk in events[:-1])


async def test_several_answers_have_their_places(server: Server) -> None:
    answer = await server.post(COMPLETIONS, prompt="once", n=2, **LONG)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 12


async def test_a_prompt_of_token_ids_counts_as_it_is(server: Server) -> None:
    answer = await server.post(COMPLETIONS, prompt=list(range(300, 350)), max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 50


async def test_the_start_of_a_repeated_prompt_is_cached_in_whole_blocks(server: Server) -> None:
    prompt = list(range(1000, 1200))
    first, again = [await server.post(COMPLETIONS, prompt=prompt, max_tokens=1) for _ in range(2)]
    assert not (first["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or server.real
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192  # six blocks of 32


async def test_a_prompt_that_is_cached_whole_computes_its_last_block_again(server: Server) -> None:
    prompt = list(range(2000, 2064))
    _, again = [await server.post(COMPLETIONS, prompt=prompt, max_tokens=1) for _ in range(2)]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_a_cache_salt_separates_caches(server: Server) -> None:
    prompt = list(range(1500, 1700))
    await server.post(COMPLETIONS, prompt=prompt, max_tokens=1, cache_salt="one")
    other = await server.post(COMPLETIONS, prompt=prompt, max_tokens=1, cache_salt="two")
    assert not (other["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": HELLO, "model": "no-such-model"}, 404),
        (CHAT, {}, 400),
        (CHAT, {"messages": "hi"}, 400),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 400),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400),
        (COMPLETIONS, {"prompt": list(range(300, 400)) * 1000}, 400),
    ],
)
async def test_errors_have_one_shape(server: Server, path: str, body: dict[str, Any], status: int) -> None:
    found, answer = await server.refused(path, **body)
    assert found == status
    assert answer["error"]["message"] and answer["error"]["type"]
    assert answer["error"]["code"] == status


async def test_a_body_that_is_no_json_is_refused(server: Server) -> None:
    answer = await server.http.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "streams"),
    [
        ({"max_tokens": 4.0}, False),
        ({"max_tokens": "4", "min_tokens": "1"}, False),
        ({"max_tokens": 4, "n": 1.0, "temperature": "0.5"}, False),
        ({"max_tokens": 4, "n": "1", "stream": "no"}, False),
        ({"max_tokens": 4, "stream": "true"}, True),
        ({"max_tokens": 4, "stream": 1}, True),
        ({"max_tokens": 4, "user": "\ud800"}, False),
    ],
    ids=str,
)
async def test_values_are_read_by_lax_rules(server: Server, fields: dict[str, Any], streams: bool) -> None:
    content = json.dumps({"model": server.model, "messages": HELLO, **fields})
    answer = await server.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream") == streams
    if not streams:
        assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 1.5}, {"max_tokens": "1.5"}, {"n": "one"}, {"stream": "maybe"}, {"stream": 2}], ids=str
)
async def test_what_no_lax_rule_reads_is_refused(server: Server, fields: dict[str, Any]) -> None:
    assert (await server.refused(CHAT, messages=HELLO, **fields))[0] == 400


async def test_arguments_of_a_strict_tool_fit_its_schema_and_others_are_json_alone(server: Server) -> None:
    """A real model without training shows the same: any JSON comes where the tool is not strict."""
    schema = {
        "type": "object", "properties": {"city": {"enum": ["a", "b"]}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    for strict in (True, False):
        tool = {"type": "function", "function": {"name": "get_weather", "strict": strict, "parameters": schema}}
        choice = {"type": "function", "function": {"name": "get_weather"}}
        body = {"messages": HELLO, "max_tokens": 200, "tools": [tool], "tool_choice": choice}
        answer = await server.post(CHAT, **body)
        (choice_made,) = answer["choices"]
        if choice_made["finish_reason"] == "length":  # cut: it shows as text
            continue
        (call,) = choice_made["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert not strict or arguments in ({"city": "a"}, {"city": "b"})
