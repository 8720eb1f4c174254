"""Responses as vLLM makes chat completions of them; token counts of such bodies agree with a vLLM 0.32 server."""

from __future__ import annotations

from typing import Any

import pytest

from scheduling.errors import PromptError
from scheduling.prompt import chat_prompt
from scheduling.responses_api import chat_of_response


def test_a_text_is_a_question() -> None:
    chat = chat_of_response({"instructions": "Be brief.", "input": "hi"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat == {"messages": messages}
    assert chat_prompt(chat) == chat_prompt({"messages": messages})


def test_items_of_one_answer_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("c", "f"), ("d", "g"))
    ]
    assert chat_of_response({"input": items})["messages"] == [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "reasoning": "hm", "content": "well", "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]


def test_a_partial_answer_is_continued() -> None:
    answer = {"type": "message", "role": "assistant", "status": "incomplete", "content": "we"}
    chat = chat_of_response({"input": [{"role": "user", "content": "hi"}, answer]})
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)


def test_functions_have_the_form_of_chat_completions() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
    search = {"type": "web_search"}
    chat = chat_of_response({"input": "hi", "tools": [function, search]})
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, search]


def test_an_item_of_another_kind_counts_by_its_content_alone() -> None:
    one, other = (chat_prompt(chat_of_response({"input": [{"type": "computer_call", "x": x}]})) for x in (1, 2))
    assert one.has_media and one != other


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": 5}, {"input": ["hi"]}, {"input": [{}]}])
def test_a_wrong_shape_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        chat_of_response(body)
