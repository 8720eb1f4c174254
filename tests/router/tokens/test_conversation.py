"""What vLLM gives to a chat template, by cases whose outcome was read off a vLLM 0.32 server."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.tokens.conversation import ContentFormat, UntokenizedError, template_input


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_input({"messages": list(messages)}, "string", {}).messages


def test_text_parts_become_one_string_with_line_ends_between() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    assert messages_of({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb\nc"}]


def test_a_template_that_iterates_over_parts_gets_parts_with_their_extra_fields() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    given = template_input({"messages": [{"role": "user", "content": parts}]}, "openai", {})
    assert given.messages[0]["content"] == parts


def test_arguments_of_tool_calls_are_parsed_and_the_request_stays_as_it_was() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "g", "arguments": "[1"}}
    (message,) = messages_of({"role": "assistant", "content": None, "tool_calls": [call, broken]})
    assert message["content"] == ""
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [{"b": 1, "a": 2}, {}]
    assert call["function"]["arguments"] == '{"b": 1, "a": 2}'


def test_reasoning_has_both_names_and_an_empty_list_of_calls_is_left_out() -> None:
    (message,) = messages_of({"role": "assistant", "content": "x", "reasoning_content": "why", "tool_calls": []})
    assert message == {"role": "assistant", "content": "x", "reasoning": "why", "reasoning_content": "why"}


def test_the_content_of_a_tool_message_is_a_string_for_every_template() -> None:
    sent = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]}
    given = template_input({"messages": [sent]}, "openai", {})
    assert given.messages == [{"role": "tool", "tool_call_id": "1", "content": "4"}]


def test_a_billing_header_that_changes_in_every_request_is_dropped_from_system_prompts() -> None:
    header = "x-anthropic-billing-header: cch=123;"
    assert messages_of({"role": "system", "content": f"{header}\nBe brief."})[0]["content"] == "Be brief."
    assert messages_of({"role": "system", "content": header})[0]["content"] == ""


def test_tools_have_the_fields_and_the_order_of_vllms_model() -> None:
    tool = {"function": {"parameters": {"z": 1, "a": 2}, "name": "f", "extra": 1}, "type": "function"}
    given = template_input({"messages": [], "tools": [tool]}, "string", {})
    assert given.tools is not None
    assert str(given.tools[0]) == str(
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}}}
    )


def test_variables_of_the_request_win_over_the_servers_and_fields_over_both() -> None:
    body = {"messages": [], "reasoning_effort": "low", "chat_template_kwargs": {"a": 1, "add_generation_prompt": False}}
    assert template_input(body, "string", {"a": 2, "b": 3}).variables == {
        "a": 1, "b": 3, "add_generation_prompt": True, "continue_final_message": False, "reasoning_effort": "low",
        "enable_thinking": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "hologram", "hologram": {"url": "data:"}}]}]},
        {"messages": [], "chat_template": "{{ messages }}"},
        {"messages": [], "tools": [{"type": "web_search"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
    ],
)
def test_what_cannot_be_computed_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(UntokenizedError):
        template_input(body, "string", {})


def test_media_are_named_as_templates_expect_them() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert template_input(body, "openai", {}).messages[0]["content"] == [parts[0], {"type": "image"}]
    assert template_input(body, "string", {}).messages[0]["content"] == "look"


@pytest.mark.parametrize("content_format", ["string", "openai"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer", "critic"])
@pytest.mark.parametrize("text", ["", "a\nb", "x-anthropic-billing-header: 1\nrest"])
def test_a_message_of_role_and_text_alone_reads_as_one_with_a_field_that_says_nothing(
    content_format: ContentFormat, role: str, text: str
) -> None:
    plain = {"role": role, "content": text}
    (short,) = template_input({"messages": [plain]}, content_format, {}).messages
    (long,) = template_input({"messages": [{**plain, "unread": 1}]}, content_format, {}).messages

    assert list(short.items()) == list(long.items())


def test_calls_have_the_order_of_fields_that_validation_gives_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}, "x": 1, "id": "c"}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    (validated,) = template_input(body, "string", {}).messages[0]["tool_calls"]
    assert list(validated) == ["id", "function", "type", "x"] and list(validated["function"]) == ["arguments", "name"]
    (as_given,) = template_input(body, "string", {}, validated=False).messages[0]["tool_calls"]
    assert list(as_given) == list(call) and list(as_given["function"]) == ["name", "arguments"]


def test_a_result_that_refers_to_tools_keeps_its_parts_where_the_template_takes_parts() -> None:
    parts = [{"type": "text", "text": ""}, {"type": "tool_reference", "name": "f"}]
    body = {"messages": [{"role": "tool", "tool_call_id": "c", "content": parts}]}
    assert template_input(body, "openai", {}).messages[0]["content"] == parts
    assert template_input(body, "string", {}).messages[0]["content"] == "f"
