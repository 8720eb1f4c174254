"""The unmodified `openai` and `anthropic` clients, on every API of the emulated instances, through a whole fleet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.fleet.fleet_process import Fleet

HELLO: Any = [{"role": "user", "content": "Hello!"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
def claude(fleet: Fleet) -> Iterator[Anthropic]:
    with Anthropic(base_url=fleet.endpoint, api_key="any", max_retries=0, timeout=60) as client:
        yield client


# OpenAI's client ----------------------------------------------------------------------------------------------
def test_a_batch_and_several_answers_come_together(fleet: Fleet, client: OpenAI) -> None:
    batch = client.completions.create(model=fleet.model, prompt=["once", "upon", "a time"], max_tokens=4, n=2)
    assert [choice.index for choice in batch.choices] == list(range(6))
    chunks = list(client.chat.completions.create(model=fleet.model, messages=HELLO, max_tokens=4, n=2, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    fleet.until_idle()


def test_answers_stop_where_told_and_tell_their_log_probabilities(fleet: Fleet, client: OpenAI) -> None:
    full = client.completions.create(model=fleet.model, prompt="Once", max_tokens=20).choices[0].text
    stopped = client.completions.create(
        model=fleet.model, prompt="Once", max_tokens=20, stop=full[30:36], logprobs=1, echo=True
    ).choices[0]
    assert stopped.text == "Once" + full[: full.index(full[30:36])]
    assert stopped.finish_reason == "stop"
    assert stopped.logprobs is not None


def test_json_and_tool_calls_fit_their_schemas_streamed_or_not(fleet: Fleet, client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
    place = client.chat.completions.create(model=fleet.model, messages=HELLO, response_format=wanted)
    assert "city" in json.loads(place.choices[0].message.content or "")
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": CITY}}]
    called: Any = client.chat.completions.create(model=fleet.model, messages=HELLO, tools=tools, tool_choice="required")
    arguments = called.choices[0].message.tool_calls[0].function.arguments
    streamed = ""
    with client.chat.completions.stream(
        model=fleet.model, messages=HELLO, tools=tools, tool_choice="required"
    ) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                streamed += event.arguments_delta
    assert "city" in json.loads(arguments)
    assert streamed == arguments


def test_what_an_instance_refuses_reaches_the_client_by_name(fleet: Fleet, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="regex is not emulated"):
        client.chat.completions.create(
            model=fleet.model, messages=HELLO, extra_body={"structured_outputs": {"regex": "a+"}}
        )
    with pytest.raises(openai.BadRequestError, match="`tools` must be set"):
        client.chat.completions.create(model=fleet.model, messages=HELLO, tool_choice="required")
    fleet.until_idle()


def test_responses_are_created_and_streamed(fleet: Fleet, client: OpenAI) -> None:
    whole = client.responses.create(model=fleet.model, input="Hello!", max_output_tokens=12)
    with client.responses.stream(model=fleet.model, input="Hello!", max_output_tokens=12) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == whole.output_text == final.output_text
    with pytest.raises(openai.NotFoundError, match="'resp_1' not found"):
        client.responses.create(model=fleet.model, input="Hello!", previous_response_id="resp_1")


def test_stored_responses_are_read_where_they_are_stored(fleet: Fleet, client: OpenAI) -> None:
    made = [client.responses.create(model=fleet.model, input=f"{n} Hello!", max_output_tokens=3) for n in range(6)]
    assert len({each.id.rpartition("@")[2] for each in made}) > 1
    for each in made:
        assert client.responses.retrieve(each.id).output_text == each.output_text
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            client.responses.cancel(each.id)
        with pytest.raises(openai.APIStatusError) as refused:
            client.responses.delete(each.id)  # vLLM has no such path
        assert refused.value.status_code == 405
    for sent_id in ("team/42", "a@b/../c", "x=y+z"):
        own = client.responses.create(model=fleet.model, input="Hi!", extra_headers={"x-request-id": sent_id})
        assert client.responses.retrieve(own.id).id == own.id
    with pytest.raises(openai.NotFoundError, match="ids that this fleet gave"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="not in the fleet"):
        client.responses.retrieve("resp_1@gone")
    fleet.until_idle()


def test_embeddings_are_made(fleet: Fleet, client: OpenAI) -> None:
    answer = client.embeddings.create(model=fleet.model, input=["one text", "another text"])
    assert len({len(each.embedding) for each in answer.data}) == 1
    with pytest.raises(openai.BadRequestError, match="cannot be empty"):
        client.embeddings.create(model=fleet.model, input="")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_reranked(fleet: Fleet, path: str) -> None:
    body = {"model": fleet.model, "query": "the capital", "documents": ["a river", "the capital"]}
    answer = httpx.post(f"{fleet.endpoint}{path}", json=body, timeout=30)
    assert [result["index"] for result in answer.json()["results"]] == [1, 0]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_are_scored(fleet: Fleet, path: str) -> None:
    body = {"model": fleet.model, "text_1": "the capital", "text_2": ["a river", "the capital"]}
    answer = httpx.post(f"{fleet.endpoint}{path}", json=body, timeout=30)
    assert answer.json()["data"][1]["score"] == pytest.approx(1, abs=1e-5)


# Anthropic's client -------------------------------------------------------------------------------------------
def test_messages_are_created_and_streamed(fleet: Fleet, claude: Anthropic) -> None:
    whole: Any = claude.messages.create(model=fleet.model, messages=HELLO, max_tokens=12)
    with claude.messages.stream(model=fleet.model, messages=HELLO, max_tokens=12) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)


def test_a_message_uses_a_tool_and_goes_on_with_its_result(fleet: Fleet, claude: Anthropic) -> None:
    tools: Any = [{"name": "get_weather", "strict": True, "input_schema": CITY}]
    used: Any = claude.messages.create(
        model=fleet.model, messages=HELLO, max_tokens=100, tools=tools, tool_choice={"type": "any"}
    )
    assert used.stop_reason == "tool_use"
    assert "city" in used.content[0].input
    result = {"type": "tool_result", "tool_use_id": used.content[0].id, "content": "sunny"}
    turns: Any = [*HELLO, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
    answer: Any = claude.messages.create(model=fleet.model, messages=turns, max_tokens=4, tools=tools)
    assert answer.content[0].text
    counted = claude.messages.count_tokens(model=fleet.model, messages=turns, tools=tools)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_errors_are_anthropic_s_whether_an_instance_or_the_fleet_refuses(fleet: Fleet, claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="cannot be greater than max_model_len") as by_instance:
        claude.messages.create(model=fleet.model, messages=HELLO, max_tokens=500_000)
    with pytest.raises(anthropic.NotFoundError, match="no-such-model") as by_fleet:
        claude.messages.create(model="no-such-model", messages=HELLO, max_tokens=1)
    for refused in (by_instance, by_fleet):
        assert isinstance(refused.value.body, dict)
        assert refused.value.body["type"] == "error"
    assert fleet.live_requests() == []
