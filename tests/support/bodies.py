"""A body of every API, with all the fields that are read of it, and values that no field is meant to have."""

from __future__ import annotations

import copy
from typing import Any

ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**70, 1.0, 1024.0, 1.5, 1e300, float("nan"), "", "100", "true", "\ud800", "text",
    "user", "system", "message", "image_url", [], [None], [1], [[]], ["\ud800"], [{}], {}, {"": None}, {"type": "text"},
    {"\ud800": 2**70}, [{"type": "text", "text": 1}], [{"type": ["text"]}], [[1], "a"], [1, "a"], [1.5],
]  # fmt: skip

USER = {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "u"}}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {
    "max_tokens": 5, "min_tokens": 1, "n": 1, "stream": True, "stop": ["x"], "temperature": 0.5, "logprobs": 1,
    "user": "u", "cache_salt": "s", "echo": False, "priority": 1, "seed": 7, "kv_transfer_params": None,
    "request_id": "r", "truncate_prompt_tokens": None, "add_special_tokens": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": [
            {"role": "system", "content": "be brief"}, USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "name": "a", "reasoning": "r"},
            {"role": "tool", "content": "out", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "max_completion_tokens": 5, "response_format": {"type": "text"}, "metadata": {"a": "b"},
        "chat_template_kwargs": {"a": 1}, "documents": [{"text": "t"}], "reasoning_effort": "low", "best_of": 1,
    },
    "/v1/completions": {**SAMPLING, "prompt": ["a", "b"], "suffix": None, "best_of": 1, "prompt_embeds": None},
    "/v1/messages": {
        "max_tokens": 5, "stream": True, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "hi"}, {"type": "document", "source": {"type": "text", "data": "d"}},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
            ]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "i", "content": [
                    {"type": "text", "text": "x"}, {"type": "image", "source": {"type": "url", "url": "u"}},
                    {"type": "tool_reference", "tool_name": "f"},
                ]},
            ]},
            {"role": "system", "content": [
                {"type": "tool_addition", "tool": {"definition": {"name": "g", "input_schema": {}}}},
                {"type": "tool_removal", "tool": {"name": "f"}}, {"type": "text", "text": "s"},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "description": "d", "strict": True}],
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "metadata": {"user_id": "u"},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "i", "namespace": "n"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        ],
        "instructions": "be brief", "stream": True, "store": False, "previous_response_id": None,
        "max_output_tokens": 5, "tools": [
            {"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "g", "description": "d"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]}, {"type": "web_search"},
        ],
        "reasoning": {"effort": "low"}, "request_id": "r",
    },
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float", "dimensions": 3, "user": "u"},
    "/v1/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/v1/score": {"text_1": "a", "text_2": ["b", {"content": [{"text": "c"}]}]},
    "/pooling": {"messages": [USER], "input": [[1, 2], [3]], "truncate_prompt_tokens": 3},
    "/tokenize": {"prompt": "a", "add_special_tokens": True},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}, "stream": False},
    "/v1/brand/new": {"prompt": "a"},
}  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are, at any depth."""
    if isinstance(value, dict):
        inner = [place for key, each in value.items() for place in places(each, (*at, key))]
    elif isinstance(value, list):
        inner = [place for index, each in enumerate(value) for place in places(each, (*at, index))]
    else:
        inner = []
    return [at, *inner] if at else inner


def with_value(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The body with another value in a place."""
    changed = copy.deepcopy(body)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed
