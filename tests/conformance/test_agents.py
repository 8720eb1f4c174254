"""The APIs of agents: messages and responses, whole and streamed."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conformance.server import Server

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello there"}]


async def test_a_message_is_answered(server: Server) -> None:
    answer = await server.post(MESSAGES, messages=HELLO, max_tokens=5)
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["stop_reason"] in ("max_tokens", "end_turn")
    assert answer["usage"]["input_tokens"] > 0 and answer["usage"]["output_tokens"] > 0


async def test_a_streamed_message_has_its_events_in_order(server: Server) -> None:
    events = await server.stream(MESSAGES, messages=HELLO, max_tokens=5)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert all(name == event["type"] for name, event in events)
    assert events[-2][1]["usage"]["output_tokens"] > 0


async def test_cached_tokens_of_a_message_are_counted_apart(server: Server) -> None:
    messages = [{"role": "user", "content": f"{uuid.uuid4()} the same words again and again, " * 20}]
    whole, created = 0, []
    for _ in range(2):
        usage = (await server.post(MESSAGES, messages=messages, max_tokens=1))["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        total = usage["input_tokens"] + cached + usage.get("cache_creation_input_tokens", 0)
        assert whole in (0, total)
        whole = total
        created.append(usage["cache_creation_input_tokens"])
    assert cached > 0 and cached % 32 == 0
    assert created[0] == whole // 32 * 32, "what is cached afterwards"
    assert created[1] < 32 or whole % 32 == 0


async def test_tokens_of_a_message_are_counted_without_an_answer(server: Server) -> None:
    counted = await server.post(f"{MESSAGES}/count_tokens", messages=HELLO)
    usage = (await server.post(MESSAGES, messages=HELLO, max_tokens=1))["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


async def test_a_system_prompt_of_one_text_lacks_the_line_that_differs_in_every_request(server: Server) -> None:
    counts = []
    for system in ("Be brief.", "x-anthropic-billing-header: cch=12ab;\nBe brief."):
        body = {"system": system, "messages": HELLO}
        counts.append((await server.post(f"{MESSAGES}/count_tokens", **body))["input_tokens"])
    chat = [{"role": "system", "content": "x-anthropic-billing-header: cch=34cd;\nBe brief."}, *HELLO]
    counts.append((await server.post("/tokenize", messages=chat))["count"])
    assert len(set(counts)) == 1


async def test_errors_of_messages_are_anthropics(server: Server) -> None:
    status, answer = await server.refused(MESSAGES, messages=HELLO, max_tokens=5, model="no-such-model")
    assert status == 404 and answer["type"] == "error" and answer["error"]["message"]


async def test_a_response_is_answered(server: Server) -> None:
    answer = await server.post(RESPONSES, input="hello there", max_output_tokens=5)
    assert (answer["object"], answer["status"] in ("completed", "incomplete")) == ("response", True)
    (item,) = answer["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert answer["usage"]["input_tokens"] > 0 and answer["usage"]["output_tokens"] > 0


async def test_a_response_has_the_id_that_it_was_given(server: Server) -> None:
    given = "resp_conformance@npu-0"
    answer = await server.post(RESPONSES, input="hello there", max_output_tokens=2, request_id=given)
    assert answer["id"] == given


async def test_a_streamed_response_has_its_events_in_order(server: Server) -> None:
    events = await server.stream(RESPONSES, input="hello there", max_output_tokens=5)
    names = [name for name, _ in events]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert names[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert events[-1][1]["response"]["usage"]["output_tokens"] > 0


async def test_a_stored_response_is_found_and_continued(server: Server) -> None:
    given = f"resp_{uuid.uuid4().hex}@npu-0"
    first = await server.post(RESPONSES, input="hello there", max_output_tokens=4, request_id=given, store=True)
    path = f"{RESPONSES}/{given}"
    found = await server.http.get(path)
    if server.real and found.status_code == 404:
        pytest.skip("the server stores no responses: VLLM_ENABLE_RESPONSES_API_STORE=1")

    assert found.json()["id"] == first["id"] == given
    again = await server.post(RESPONSES, input="and?", max_output_tokens=4, previous_response_id=given, store=True)
    assert again["previous_response_id"] == given and again["id"] != given
    assert again["usage"]["input_tokens"] > first["usage"]["total_tokens"]  # the conversation before it, and its own


async def test_an_unknown_response_is_not_found(server: Server) -> None:
    assert (await server.http.get(f"{RESPONSES}/resp_unknown")).status_code == 404


async def test_an_unknown_previous_response_is_not_found(server: Server) -> None:
    status, answer = await server.refused(RESPONSES, input="and?", previous_response_id="resp_unknown")
    assert status == 404 and "resp_unknown" in answer["error"]["message"]


async def test_a_conversation_has_the_same_tokens_over_every_api(server: Server) -> None:
    system = "You answer briefly."
    chat: Any = [{"role": "system", "content": system}, *HELLO]
    tokens = (await server.post("/tokenize", messages=chat))["count"]
    message = (await server.post(MESSAGES, system=system, messages=HELLO, max_tokens=1))["usage"]
    response = (await server.post(RESPONSES, instructions=system, input=HELLO, max_output_tokens=1))["usage"]
    completion = (await server.post("/v1/chat/completions", messages=chat, max_tokens=1))["usage"]
    apart = message.get("cache_read_input_tokens", 0) + message.get("cache_creation_input_tokens", 0)
    assert tokens == message["input_tokens"] + apart == response["input_tokens"] == completion["prompt_tokens"]
