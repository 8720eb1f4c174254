"""The checker beside real emulated instances: it knows their answers, and notices what is not as it should be."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from dualmap.research.chaos.answers import Api
from dualmap.research.chaos.checker import Outcome, Question, RightAnswers, judge
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.http_client import HttpClient

SETTINGS = EmulatorSettings(port=0, time_scale=20, stream_interval=3)
TOOL = {"name": "forecast", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
MESSAGE = [{"role": "user", "content": "Tell me a story."}]
BODIES: dict[str, tuple[Api, dict[str, Any]]] = {
    "chat": (Api.CHAT, {"messages": MESSAGE, "max_tokens": 40}),
    "chat, n": (Api.CHAT, {"messages": MESSAGE, "max_tokens": 40, "n": 3}),
    "chat, drawn length": (Api.CHAT, {"messages": MESSAGE}),
    "chat, logprobs": (Api.CHAT, {"messages": MESSAGE, "max_tokens": 20, "logprobs": True}),
    "chat, JSON": (Api.CHAT, {"messages": MESSAGE, "response_format": {"type": "json_object"}}),
    "chat, tool": (
        Api.CHAT,
        {
            "messages": MESSAGE,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "forecast"}},
        },
    ),
    "completions": (Api.COMPLETIONS, {"prompt": "Once", "max_tokens": 40}),
    "completions, stop": (Api.COMPLETIONS, {"prompt": "Once", "max_tokens": 400, "stop": ["ban", "mel "]}),
    "completions, logprobs": (Api.COMPLETIONS, {"prompt": "Once", "max_tokens": 20, "logprobs": 1, "n": 2}),
    "messages": (Api.MESSAGES, {"messages": MESSAGE, "max_tokens": 40}),
    "messages, stop": (Api.MESSAGES, {"messages": MESSAGE, "max_tokens": 400, "stop_sequences": ["ban", "mel "]}),
    "messages, tool": (
        Api.MESSAGES,
        {
            "messages": MESSAGE,
            "max_tokens": 400,
            "tools": [{"name": "forecast", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    "responses": (Api.RESPONSES, {"input": "Tell me a story.", "max_output_tokens": 40}),
}


@pytest.fixture
async def instance() -> AsyncIterator[HttpClient]:
    async with emulated_instances(SETTINGS) as [instance]:
        client = HttpClient(instance.url)
        yield client
        client.close()


def question(api: Api, body: dict[str, Any], *, stream: bool = True, usage: bool = False) -> Question:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    whole = {"model": SETTINGS.served_model, "stream": stream, **body, **options}
    return RightAnswers(SETTINGS).question(0, api, whole)


async def answer(client: HttpClient, asked: Question) -> tuple[int, bytes]:
    body = bytearray()
    response = await client.request("POST", asked.api, json.dumps(asked.body).encode(), on_body=body.extend)
    return response.status, bytes(body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", BODIES)
async def test_what_an_instance_answers_is_right(instance: HttpClient, form: str, stream: bool) -> None:
    asked = question(*BODIES[form], stream=stream)

    assert judge(asked, *await answer(instance, asked)).outcome is Outcome.RIGHT


async def test_a_streamed_usage_that_was_asked_for_must_come(instance: HttpClient) -> None:
    asked = question(*BODIES["chat"], usage=True)
    status, body = await answer(instance, asked)

    assert judge(asked, status, body).outcome is Outcome.RIGHT
    without = b"".join(event + b"\n\n" for event in body.split(b"\n\n")[:-1] if b'"usage"' not in event)
    assert "usage" in judge(asked, status, without).why


@pytest.mark.parametrize(("stream", "outcome"), [(True, Outcome.RIGHT), (False, Outcome.WRONG)])
async def test_only_a_streamed_response_may_end_with_no_usage(
    instance: HttpClient, stream: bool, outcome: Outcome
) -> None:
    asked = question(*BODIES["responses"], stream=stream)
    status, body = await answer(instance, asked)

    counted = re.compile(rb'"usage": ?\{"input_tokens".*?"total_tokens": ?\d+\}')
    without, found = counted.subn(b'"usage":null', body)

    assert found == 1
    assert judge(asked, status, without).outcome is outcome


async def test_an_instance_with_another_seed_is_wrong_in_every_form(instance: HttpClient) -> None:
    other = RightAnswers(SETTINGS.model_copy(update={"seed": 5}))
    for form, (api, body) in BODIES.items():
        if "tool" in form or "JSON" in form or "drawn" in form:
            continue
        asked = other.question(0, api, {"model": SETTINGS.served_model, "stream": True, **body})
        verdict = judge(asked, *await answer(instance, asked))
        assert verdict.outcome is Outcome.WRONG, form


async def streamed(instance: HttpClient, form: str) -> tuple[Question, list[bytes]]:
    """A request with the events of its answer."""
    asked = question(*BODIES[form])
    _, body = await answer(instance, asked)
    return asked, body.split(b"\n\n")[:-1]


def joined(events: list[bytes]) -> bytes:
    return b"".join(event + b"\n\n" for event in events)


@pytest.mark.parametrize("form", ["chat", "completions", "messages", "responses"])
async def test_a_piece_that_is_missing_or_comes_twice_is_wrong(instance: HttpClient, form: str) -> None:
    asked, events = await streamed(instance, form)
    middle = len(events) // 2

    for changed in (
        [*events[:middle], *events[middle + 1 :]],
        [*events[:middle], events[middle], *events[middle:]],
        events[:-1],
        [*events, events[-1]],
        [*events[:2], *events],
    ):
        assert judge(asked, 200, joined(changed)).outcome is Outcome.WRONG


async def test_a_stream_that_changes_its_id_is_wrong(instance: HttpClient) -> None:
    asked, events = await streamed(instance, "chat")
    events[3] = events[3].replace(b'"id":"chatcmpl-', b'"id":"chatcmpl-x')

    assert "changed" in judge(asked, 200, joined(events)).why


async def test_a_second_role_is_wrong(instance: HttpClient) -> None:
    asked, events = await streamed(instance, "chat")

    assert "role twice" in judge(asked, 200, joined([events[0], *events])).why


@pytest.mark.parametrize("form", ["chat", "messages"])
async def test_a_right_beginning_with_an_error_event_is_cut(instance: HttpClient, form: str) -> None:
    asked, events = await streamed(instance, form)
    error = b'data: {"error": {"message": "the engine died", "code": 500}}'
    beginning = joined(events[:4])

    assert judge(asked, 200, beginning + error + b"\n\n").outcome is Outcome.BROKEN
    assert judge(asked, None, beginning + error + b"\n\n").outcome is Outcome.BROKEN
    assert judge(asked, None, beginning).outcome is Outcome.LOST
    wrong = beginning.replace(b"l", b"r")
    assert judge(asked, 200, wrong + error + b"\n\n").outcome is Outcome.WRONG
    assert judge(asked, 200, beginning).outcome is Outcome.WRONG


async def test_an_answer_that_the_engine_aborted_is_cut(instance: HttpClient) -> None:
    asked, events = await streamed(instance, "chat")
    last = events[-2].replace(b'"finish_reason":"length"', b'"finish_reason":"abort"')
    events[-2:] = [b'data: {"id"' + last.partition(b'"id"')[2], events[-1]]

    verdict = judge(asked, 200, joined(events))

    assert verdict.outcome is Outcome.BROKEN


def test_an_error_of_the_api_is_a_refusal_and_anything_else_is_wrong() -> None:
    asked = question(*BODIES["chat"], stream=False)

    refused = judge(asked, 503, b'{"error": {"message": "no instance", "type": "server_error", "code": "no_instance"}}')
    assert refused.outcome is Outcome.REFUSED and "no_instance" in refused.why
    assert judge(asked, 502, b"<html>Bad Gateway</html>").outcome is Outcome.WRONG
    assert judge(asked, 200, b"{}").outcome is Outcome.WRONG
    assert judge(asked, 200, b"").outcome is Outcome.WRONG
    assert judge(asked, None, b"").outcome is Outcome.LOST


def test_a_comment_in_a_stream_is_no_event() -> None:
    asked = question(*BODIES["completions"])

    assert judge(asked, None, b": the stream goes on at another instance\n\n").outcome is Outcome.LOST


async def test_a_stream_that_no_instance_could_continue_is_cut_and_not_broken(instance: HttpClient) -> None:
    error = b'data: {"error": {"message": "the engine died", "code": 500}}'
    for form in ("chat, JSON", "chat, tool", "messages, tool"):
        asked, events = await streamed(instance, form)
        assert judge(asked, 200, joined([events[0], error])).outcome is Outcome.CUT, form
    for form in ("chat, n", "responses"):
        asked, events = await streamed(instance, form)
        assert judge(asked, 200, joined([events[0], error])).outcome is Outcome.BROKEN, form


@pytest.mark.parametrize("form", ["chat", "completions"])
async def test_a_stream_without_a_reason_for_its_end_is_wrong(instance: HttpClient, form: str) -> None:
    asked, events = await streamed(instance, form)
    events[-2] = events[-2].replace(b'"finish_reason":"length"', b'"finish_reason":null')

    assert judge(asked, 200, joined(events)).outcome is Outcome.WRONG


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_its_engine_aborted_is_cut_although_it_says_that_it_is_complete(stream: bool) -> None:
    settings = SETTINGS.model_copy(update={"scale_out": True, "time_scale": 1.0})
    async with emulated_instances(settings) as [instance]:
        body = {"input": "Tell me a story.", "max_output_tokens": 4000, "request_id": "resp_1", "stream": stream}
        question = RightAnswers(settings).question(1, Api.RESPONSES, body | {"model": settings.served_model})
        async with httpx.AsyncClient(base_url=instance.url, timeout=60) as http:
            asking = asyncio.create_task(http.post("/v1/responses", json=question.body))
            while not asking.done():
                await asyncio.sleep(0.1)
                await http.post("/inference/v1/abort_requests", json={"request_ids": ["resp_1_0"]})
            answer = await asking
        verdict = judge(question, answer.status_code, answer.content)
    assert (verdict.outcome, "aborted" in verdict.why) == (Outcome.CUT, True)
