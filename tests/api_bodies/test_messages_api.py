"""Messages as vLLM makes chat completions of them; token counts of such bodies agree with a vLLM 0.32 server."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.prompt import chat_prompt

TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def test_a_conversation_is_the_chat_that_it_would_be() -> None:
    body = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"b": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        "tools": [TOOL],
    }
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "reasoning": "hm", "tool_calls": [call], "content": "well"},
            {"role": "tool", "tool_call_id": "t", "content": "4"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        ],
    }
    assert chat_of_message(body) == chat
    assert chat_prompt(chat_of_message(body)) == chat_prompt(chat)


def test_later_system_messages_stay_in_place_unless_the_template_takes_none() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "reminder"}]
    body = {"system": "first. ", "messages": messages}
    assert [each["role"] for each in chat_of_message(body)["messages"]] == ["system", "user", "system"]
    assert chat_of_message(body, system_first=True)["messages"] == [
        {"role": "system", "content": "first. reminder"},
        {"role": "user", "content": "a"},
    ]


def test_a_billing_header_that_changes_in_every_request_is_dropped() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Be brief."}]
    messages = chat_of_message({"system": system, "messages": [{"role": "user", "content": "a"}]})["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}


HEADER = "x-anthropic-billing-header: cch=1"


def test_a_system_prompt_of_one_text_that_begins_with_the_billing_header_is_kept() -> None:
    """vLLM drops the line later, where it renders the chat, and so does the rendering here."""
    body = {"system": f"{HEADER}\nBe brief.", "messages": [{"role": "user", "content": "a"}]}
    chat = chat_of_message(body)
    assert chat["messages"][0] == {"role": "system", "content": f"{HEADER}\nBe brief."}
    without = chat_of_message(body | {"system": "Be brief."})
    assert bytes(chat_prompt(chat).data) == bytes(chat_prompt(without).data)


@pytest.mark.parametrize("content", [f"{HEADER}\nBe brief.", [{"type": "text", "text": f"{HEADER}\nBe brief."}]])
def test_a_later_system_message_that_begins_with_it_is_dropped_whole(content: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": content}]
    assert [each["role"] for each in chat_of_message({"messages": messages})["messages"]] == ["user"]


def test_images_are_parts_also_those_that_a_tool_gives() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    chat = chat_of_message({"messages": [{"role": "user", "content": [image, result]}]})
    assert [each["content"] for each in chat["messages"]] == ["", [part], [part]]


@pytest.mark.parametrize(
    ("thinking", "effort"),
    [({"thinking": {"type": "disabled"}}, "none"), ({"output_config": {"effort": "low"}}, "low"), ({}, None)],
)
def test_thinking_is_an_effort(thinking: dict[str, Any], effort: str | None) -> None:
    chat = chat_of_message({"messages": [{"role": "user", "content": "a"}], **thinking})
    assert chat.get("reasoning_effort") == effort


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "system": 1}, "system"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": {}}, "tools"),
    ],
)
def test_a_wrong_shape_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError) as refused:
        chat_of_message(body)
    assert refused.value.param == param


def test_tools_are_those_at_the_end_of_the_conversation() -> None:
    later = {**TOOL, "name": "later", "defer_loading": True}
    new = {"name": "new", "input_schema": {"properties": {}}}

    def change(kind: str, name: str) -> dict[str, Any]:
        return {"type": kind, "tool": {"type": "tool_reference", "name": name}}

    def names(*blocks: dict[str, Any]) -> list[tuple[str, bool]]:
        messages = [{"role": "system", "content": [block]} for block in blocks]
        body = {"tools": [TOOL, later], "messages": [{"role": "user", "content": "hi"}, *messages]}
        found = [tool["function"] for tool in chat_of_message(body)["tools"]]
        return [(each["name"], each.get("defer_loading", False)) for each in found]

    definition = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": new}}
    assert names() == [("f", False), ("later", True)]
    assert names(change("tool_addition", "later"), definition) == [("f", False), ("later", False), ("new", False)]
    assert names(change("tool_removal", "f")) == [("later", True)]
    assert names(change("tool_removal", "f"), change("tool_addition", "f")) == [("f", False), ("later", True)]


def test_a_schema_without_a_type_is_one_of_an_object() -> None:
    body = {"tools": [{"name": "f", "input_schema": {"a": 1}}], "messages": [{"role": "user", "content": "hi"}]}
    parameters = chat_of_message(body)["tools"][0]["function"]["parameters"]
    assert list(parameters.items()) == [("a", 1), ("type", "object")]


def test_references_to_tools_are_their_names() -> None:
    items = [{"type": "tool_reference", "tool_name": "f"}, {"type": "tool_reference", "name": "g"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": items}
    chat = chat_of_message({"messages": [{"role": "user", "content": [result]}]})
    assert chat["messages"][1]["content"] == [{"type": "tool_reference", "name": name} for name in ("f", "g")]
    assert not chat_prompt(chat).has_media
