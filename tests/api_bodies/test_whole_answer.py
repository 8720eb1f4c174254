"""Whole answers out of the events of streams."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.api_bodies.whole_answer import whole_answer

ABOUT = {"id": "cmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def chunk(delta: dict[str, Any], index: int = 0, **choice: Any) -> dict[str, Any]:
    return ABOUT | {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | choice]}


def test_texts_of_a_chat_are_joined_and_its_usage_is_kept() -> None:
    events = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hello"}),
        chunk({"content": " there"}, finish_reason="stop", stop_reason=None),
        ABOUT | {"choices": [], "usage": USAGE},
    ]

    assert whole_answer(events, chat=True) == {
        "id": "cmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "usage": USAGE,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }


def test_reasoning_and_tool_calls_are_put_together_by_their_index() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        about = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
        return {"tool_calls": [{"index": index, "function": function} | about]}

    events = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "let "}),
        chunk({"reasoning": "me"}),
        chunk(call(0, name="look", arguments="")),
        chunk(call(0, arguments='{"at":')),
        chunk(call(0, arguments="1}")),
        chunk(call(1, name="go", arguments="{}")),
        chunk({}, finish_reason="tool_calls"),
    ]

    answer = whole_answer(events, chat=True)

    assert answer is not None
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "let me",
        "tool_calls": [
            {"id": "call-0", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}},
            {"id": "call-1", "type": "function", "function": {"name": "go", "arguments": "{}"}},
        ],
    }


def test_texts_ids_and_logprobs_of_a_completion_are_joined() -> None:
    def part(text: str, token: int, **choice: Any) -> dict[str, Any]:
        logprobs = {"tokens": [text], "token_logprobs": [-0.5], "text_offset": [token]}
        about = {"index": 0, "text": text, "logprobs": logprobs, "token_ids": [token], "finish_reason": None}
        return ABOUT | {"choices": [about | choice]}

    answer = whole_answer([part("a", 1), part("b", 2, finish_reason="length")], chat=False)

    assert answer is not None
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("ab", [1, 2], "length")
    assert choice["logprobs"] == {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5], "text_offset": [1, 2]}


@pytest.mark.parametrize(
    "events",
    [[], [{"error": {"message": "x"}}], [chunk({"content": "a"})], [chunk({}, finish_reason="stop"), {"error": {}}]],
    ids=["nothing", "an error", "no end", "an error behind the end"],
)
def test_a_stream_that_failed_is_no_answer(events: list[dict[str, Any]]) -> None:
    assert whole_answer(events, chat=True) is None


def test_the_events_are_left_as_they_were() -> None:
    first = chunk({"tool_calls": [{"index": 0, "function": {"name": "a", "arguments": "{"}}]})
    whole_answer([first, chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]})], chat=True)
    assert first == chunk({"tool_calls": [{"index": 0, "function": {"name": "a", "arguments": "{"}}]})
