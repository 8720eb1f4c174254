"""The unmodified `openai` client against a whole fleet."""

from __future__ import annotations

import re
from itertools import count

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.fleet.fleet_process import Fleet, until

HELLO = [{"role": "user", "content": "Hello!"}]


def test_models_are_listed(fleet: Fleet, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [fleet.model]
    assert client.models.retrieve(fleet.model).id == fleet.model


def test_a_chat_completion_is_answered(fleet: Fleet, client: OpenAI) -> None:
    answer = client.chat.completions.create(model=fleet.model, messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_completion_is_answered_from_text_and_from_token_ids(fleet: Fleet, client: OpenAI) -> None:
    for prompt in ("Once upon a time", [1, 2, 3, 4]):
        answer = client.completions.create(model=fleet.model, prompt=prompt, max_tokens=4)
        assert answer.choices[0].text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4


def test_a_chat_streams_token_by_token_and_ends_with_usage(fleet: Fleet, client: OpenAI) -> None:
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=fleet.model, messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(texts) > 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_cached_tokens_of_a_stream_are_known_although_its_client_asked_for_no_usage(
    fleet: Fleet, client: OpenAI
) -> None:
    prompt = "another prompt that is long enough to fill several blocks of the prefix cache " * 60

    def told() -> str:
        """What is explained of one more stream of the prompt. The first that a replica sends to an instance goes as its
        client sent it, and shows whether the instance reports usage unasked."""
        request_id = f"stream-{next(numbers)}"
        chunks = list(
            client.completions.create(
                model=fleet.model, prompt=prompt, max_tokens=2, stream=True, extra_headers={"x-request-id": request_id}
            )
        )
        assert all(chunk.choices for chunk in chunks)
        return fleet.dualmap("explain", request_id, "--url", fleet.endpoint)

    numbers = count()
    until(lambda: re.search(r"Cached tokens: expected [\d,]+, reported [1-9]", told()), "cached tokens are reported")


def test_a_request_may_leave_out_the_model_where_one_is_served(client: OpenAI) -> None:
    answer = client.post("/chat/completions", body={"messages": HELLO, "max_tokens": 1}, cast_to=ChatCompletion)
    assert answer.choices[0].message.content


def test_a_completion_streams(fleet: Fleet, client: OpenAI) -> None:
    chunks = list(client.completions.create(model=fleet.model, prompt="Once", max_tokens=6, stream=True))
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].text]) > 1


def test_a_repeated_prompt_meets_its_cache_again(fleet: Fleet, client: OpenAI) -> None:
    prompt = "a prompt that is long enough to fill several blocks of the prefix cache " * 60
    instances, cached = set(), []
    for _ in range(3):
        raw = client.completions.with_raw_response.create(model=fleet.model, prompt=prompt, max_tokens=1)
        instances.add(raw.headers["x-dualmap-instance"])
        usage = raw.parse().usage
        assert usage is not None
        cached.append(usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0)
    assert len(instances) == 1
    assert cached[0] == 0
    assert cached[1] > 0
    assert cached[2] == cached[1]


def test_answers_name_their_request_and_the_request_can_be_explained(fleet: Fleet, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=fleet.model, messages=HELLO, max_tokens=1, extra_headers={"x-request-id": "explain-me"}
    )
    assert raw.headers["x-request-id"] == "explain-me"

    text = fleet.dualmap("explain", "explain-me", "--url", fleet.endpoint)

    assert f"Went to {raw.headers['x-dualmap-instance']}" in text
    assert "policy dualmap" in text


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=HELLO)


def test_bad_requests_are_refused_with_a_message_and_leave_nothing(fleet: Fleet, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body={"model": fleet.model, "messages": "no list"}, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        client.post("/no/such/path", body={"model": "nobody"}, cast_to=object)
    assert fleet.live_requests() == []
    assert fleet.pending_tokens() == 0


def test_a_prompt_beyond_the_context_is_the_clients_error_as_the_instance_tells_it(
    fleet: Fleet, client: OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=fleet.model, prompt=[7] * 131_073, max_tokens=1)
    fleet.until_idle()


def test_a_client_that_leaves_frees_everything_within_a_second(fleet: Fleet, client: OpenAI) -> None:
    stream = client.chat.completions.create(model=fleet.model, messages=HELLO, max_tokens=100_000, stream=True)
    next(iter(stream))
    assert len(fleet.live_requests()) == 1

    stream.close()

    until(lambda: not fleet.live_requests(), "the request is gone", deadline_s=3.0)
    assert fleet.pending_tokens() == 0
    assert all(each["load"]["running_requests"] == 0 for each in fleet.instances().values())
