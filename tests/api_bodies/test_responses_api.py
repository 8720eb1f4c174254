"""Responses as vLLM makes chat completions of them; token counts of such bodies agree with a vLLM 0.32 server."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.prompt import chat_prompt
from dualmap.api_bodies.responses_api import chat_of_response


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


def test_a_model_is_shown_functions_and_what_can_be_written_as_one() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
    custom = {"type": "custom", "name": "patch", "description": "A patch.", "format": {"type": "text"}}
    namespace = {"type": "namespace", "name": "mcp__files", "tools": [function, custom, {**function, "name": "g"}]}
    unseen = [{"type": kind} for kind in ("web_search", "local_shell", "mcp", "tool_search", "computer", "newer")]
    chat = chat_of_response({"input": "hi", "tools": [*unseen, function, custom, namespace]})
    shown = {each["function"]["name"]: each["function"] for each in chat["tools"]}
    assert list(shown) == ["f", "patch", "mcp__files__f", "mcp__files__g"]
    assert shown["f"] == {"name": "f", "parameters": {"type": "object"}}
    assert shown["patch"]["description"] == "A patch." and shown["patch"]["parameters"]["required"] == ["input"]
    assert chat_of_response({"input": "hi", "tools": unseen})["tools"] == []


def test_calls_of_custom_tools_and_of_namespaces_are_calls_of_those_functions() -> None:
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "files", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": 'é"'},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
    ]
    answer, output = chat_of_response({"input": items})["messages"]
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "files__f", "arguments": "{}"},
        {"name": "patch", "arguments": '{"input": "é\\""}'},
    ]
    assert output == {"role": "tool", "content": "done", "tool_call_id": "d"}


def test_an_item_of_another_kind_counts_by_its_content_alone() -> None:
    one, other = (chat_prompt(chat_of_response({"input": [{"type": "computer_call", "x": x}]})) for x in (1, 2))
    assert one.has_media and one != other


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": 5}, {"input": ["hi"]}, {"input": [{}]}])
def test_a_wrong_shape_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        chat_of_response(body)
