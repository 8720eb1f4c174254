"""What an answer is, by the fields of its API at their place."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.answers.checks import failure_of_object
from dualmap.router.answers.failures import failure_in
from dualmap.router.answers.fields import MOST_TOKENS, is_aborted, is_given_back, read_usage, usage_of_answer
from dualmap.router.answers.sse import ending_of_stream, ending_of_whole, event_object
from dualmap.scheduling.request.outcome import FailureKind, Usage

SCHEMA = {
    "type": "object",
    "finish_reason": "abort",
    "stop_reason": "recomputed",
    "status": "cancelled",
    "delta": {"stop_reason": None},
    "usage": {"prompt_tokens": 1, "input_tokens": 1, "output_tokens": 1, "completion_tokens": 1},
    "error": {"code": 500, "message": "EngineCore encountered an issue"},
}
"""A schema of a client's, which engines repeat in a response."""
USAGE = {"input_tokens": 9000, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 50, "total_tokens": 9050}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "error": None,
    "metadata": {"finish_reason": "abort", "usage": "abort"},
    "output": [{"type": "message", "status": "completed", "content": [{"type": "output_text", "text": "hi"}]}],
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "usage": USAGE,
    "user": "usage",
    "input_messages": [{"usage": {"input_tokens": 1, "output_tokens": 1}}],
}


def event(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(value) + b"\n\n"


@pytest.mark.parametrize(
    ("value", "aborted"),
    [
        ({"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}, True),
        ({"choices": [{"finish_reason": "stop", "message": SCHEMA}]}, False),
        ({"choices": [{"finish_reason": None}]}, False),
        ({"choices": [], "finish_reason": "abort"}, False),
        ({"type": "message", "content": [{"type": "text", "text": "so"}], "usage": {}}, True),
        ({"type": "message", "content": [], "stop_reason": None}, True),
        ({"type": "message", "content": [SCHEMA], "stop_reason": "end_turn"}, False),
        ({"type": "message_start", "message": {"stop_reason": None}}, False),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, False),
        ({"type": "message_delta", "delta": {"stop_reason": None}}, True),
        ({"type": "message_delta", "usage": {}}, False),
        ({"type": "response.completed", "response": {**RESPONSE, "status": "cancelled"}}, True),
        ({"type": "response.completed", "response": RESPONSE}, False),
        ({**RESPONSE, "status": "cancelled"}, True),
        (RESPONSE, False),
        ({"object": "list", "status": "cancelled"}, False),
    ],
)
def test_an_answer_is_aborted_where_its_own_field_says_so(value: dict[str, Any], aborted: bool) -> None:
    assert is_aborted(value) is aborted


def test_what_a_response_repeats_of_its_request_fails_nothing_and_blames_no_instance() -> None:
    for name in ("response.created", "response.completed"):
        first = event({"type": name, "response": RESPONSE}, name)
        assert failure_in(first, event_object(first)) is None
        assert ending_of_stream([first]).error_status is None
    assert failure_of_object(orjson.dumps(RESPONSE)) is None


def test_a_whole_message_without_a_reason_to_stop_was_aborted() -> None:
    message = {"id": "x", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "so far"}]}

    failure = failure_of_object(orjson.dumps({**message, "usage": {"input_tokens": 3, "output_tokens": 112}}))

    assert failure is not None and failure.kind is FailureKind.ABORTED
    assert failure_of_object(orjson.dumps({**message, "stop_reason": "max_tokens"})) is None


def test_an_answer_is_given_back_where_a_choice_says_so() -> None:
    assert is_given_back({"choices": [{"finish_reason": "stop", "stop_reason": "recomputed"}]})
    assert not is_given_back({"choices": [{"message": SCHEMA}]}) and not is_given_back({"response": RESPONSE})


def test_usage_is_found_behind_and_before_whatever_a_client_has_written() -> None:
    whole = Usage(9000, 64, 50)
    chat = {
        "choices": [{"message": {"content": '"usage":{"prompt_tokens":1}'}}],
        "usage": {"prompt_tokens": 9000, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 64}},
        "prompt_logprobs": [{"1": {"logprob": -1.0, "decoded_token": '"usage"'}}] * 1000,
        "prompt_token_ids": [*range(20_000)],
    }
    for value in (chat, RESPONSE):
        ending = ending_of_whole(orjson.dumps(value))
        assert ending.usage == whole
    for last in (event({"type": "response.completed", "response": RESPONSE}, "response.completed"), event(chat)):
        ending = ending_of_stream([event({"choices": [{"delta": {"content": "x"}}]}), last])
        assert usage_of_answer(event_object(last) or {}) == whole
        assert ending.usage == whole


def test_the_last_usage_of_a_stream_counts_and_a_null_one_is_none() -> None:
    counted = [{"choices": [{"delta": {}}], "usage": {"prompt_tokens": 7, "completion_tokens": at}} for at in (1, 2)]

    ending = ending_of_stream([*map(event, counted), event({"choices": [], "usage": None})])

    assert ending.usage == Usage(7, None, 2)


def test_usage_that_no_integer_holds_is_the_largest_count() -> None:
    usage = orjson.loads(b'{"prompt_tokens":100000000000000000000000000000,"completion_tokens":9999999999999}')

    assert read_usage(usage) == Usage(MOST_TOKENS, None, MOST_TOKENS)
    assert read_usage({"prompt_tokens": -1, "completion_tokens": "7", "output_tokens": True}) is None
