"""Kinds of requests: what may be rendered in another way is another kind."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.tokens.request_kind import RequestKind, kind_of
from tests.conformance.agent_sessions import SESSIONS

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}


def kind(path: str, **body: Any) -> RequestKind:
    sent = sent_prompt(path, body)
    assert sent is not None and sent.source is not None
    return kind_of(sent.source)


def test_requests_that_differ_in_words_alone_are_of_one_kind() -> None:
    assert kind(CHAT, messages=[USER]) == kind(CHAT, messages=[USER, {"role": "user", "content": "again"}], n=2)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT, {"reasoning_effort": "low"}),
        (CHAT, {"chat_template_kwargs": {"a": 1}}),
        (CHAT, {"tool_choice": "none"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        (CHAT, {"messages": [{**USER, "name": "n"}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "function"}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}),
        (MESSAGES, {"messages": [USER, {"role": "system", "content": [{"type": "tool_removal"}]}]}),
        (RESPONSES, {"input": [USER, {"type": "custom_tool_call", "name": "f", "input": "x"}]}),
        (RESPONSES, {"input": [USER, {"type": "function_call", "name": "f", "namespace": "n", "arguments": "{}"}]}),
        (RESPONSES, {"tools": [{"type": "web_search"}]}),
        (RESPONSES, {"truncation": "auto"}),
    ],
)
def test_what_may_be_rendered_otherwise_is_another_kind(path: str, more: dict[str, Any]) -> None:
    usual = {"input": [USER]} if path == RESPONSES else {"messages": [USER]}
    assert kind(path, **usual) != kind(path, **{**usual, **more})


def test_whatever_shape_a_body_has_its_kind_is_a_few_short_words() -> None:
    odd = [{"role": "r" * 500, "content": [{"type": "t" * 500, "text": "a", "content": [[], 7, {"type": []}]}], "x": 1}]
    assert all(len(word) < 60 for word in kind(RESPONSES, input=odd, tools=[{"type": ["x"]}]))
    kinds = [kind(path, **body) for path, session in SESSIONS.items() for body in session()]
    assert len(set(kinds)) > 10
