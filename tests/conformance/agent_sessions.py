"""Conversations as coding agents send them, one body a turn: each has the one before it as its prefix.

The shapes are those of Codex (responses), Claude Code (messages) and opencode (chat completions); the words are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

Body = dict[str, Any]

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "where — as a path"}, "limit": {"type": "integer"}},
    "required": ["path"],
}
TEXT = (
    "Look at naïve `main.py` — what's wrong?\n\n\tdef f(x):\n\t    return x+1  # 12345\r\n<|im_end|>  \u00a0✓ 你好 🙂\n"
)


def _codex_tools() -> list[Body]:
    function = {"type": "function", "name": "shell", "description": "Runs it.", "strict": False, "parameters": SCHEMA}
    return [
        function,
        {"type": "custom", "name": "apply_patch", "description": "A patch.", "format": {"type": "text"}},
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files of the project",
            "tools": [
                {**function, "name": "read", "strict": None},
                {"type": "custom", "name": "freely"},
                {**function, "name": "list", "defer_loading": True},
            ],
        },
        {"type": "local_shell"},
        {"type": "mcp", "server_label": "files", "server_url": "http://127.0.0.1:1/mcp", "require_approval": "never"},
        {"type": "tool_search"},
    ]


def codex() -> Iterator[Body]:
    """``POST /v1/responses``."""
    common = {
        "instructions": "You are a coding agent.\n" + TEXT, "tools": _codex_tools(), "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "session", "text": {"verbosity": "low"},
    }  # fmt: skip
    turns: list[list[Body]] = [
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": TEXT}, {"type": "input_text", "text": "Again."}],
            },
        ],
        [
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "Thinking"}],
                "content": [{"type": "reasoning_text", "text": "I think…"}],
                "encrypted_content": None,
            },
            {"type": "function_call", "name": "shell", "arguments": '{"path": "é"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "1\n2\n"},
        ],
        [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I read more."}]},
            {
                "type": "function_call",
                "name": "read",
                "namespace": "mcp__files",
                "arguments": '{"path": "a"}',
                "call_id": "call_2",
            },
            {
                "type": "function_call_output",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}],
            },
        ],
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Only a summary"}]},
            {"type": "custom_tool_call", "name": "apply_patch", "input": '*** "Begin" é\n', "call_id": "call_3"},
            {
                "type": "custom_tool_call",
                "name": "apply_patch",
                "input": "",
                "call_id": "call_4",
                "status": "completed",
            },
            {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done"},
            {
                "type": "custom_tool_call_output",
                "call_id": "call_4",
                "output": [{"type": "input_text", "text": "Done, too"}],
            },
        ],
        [
            {"type": "message", "role": "assistant", "phase": "final_answer", "content": "Fixed."},
            {"role": "user", "content": "Thanks.  And the tests?"},
        ],
    ]
    for items in accumulate(turns):
        yield {**common, "input": items}
    yield {"input": "Only a text, and tools of which none is shown", "tools": [{"type": "web_search"}]}


def claude_code() -> Iterator[Body]:
    """``POST /v1/messages``."""
    tools: list[Body] = [
        {"name": "Read", "description": "Reads.", "input_schema": {"$schema": "x", **SCHEMA}},
        {"name": "Bash", "description": "Runs.", "input_schema": {"properties": {"command": {"type": "string"}}}},
        {"name": "Later", "description": "Deferred.", "input_schema": SCHEMA, "defer_loading": True, "strict": False},
        {"name": "Never", "input_schema": {}},
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    common = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=12ab"},
            {"type": "text", "text": "You are an agent.", **cached},
            {"type": "text", "text": TEXT, **cached},
        ],
        "tools": tools, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "metadata": {"user_id": "someone"},
    }  # fmt: skip
    call: Body = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "é", "limit": 3}}
    turns: list[list[Body]] = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\n"},
                    {"type": "text", "text": TEXT, **cached},
                ],
            }
        ],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm — well", "signature": "s"},
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {"type": "text", "text": "I read."},
                    call,
                    {**call, "id": "toolu_2", "name": "Bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                    },
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "fails", "is_error": True, **cached},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        [
            {"role": "assistant", "content": [{**call, "id": "toolu_3", "name": "Search"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_3",
                        "content": [
                            {"type": "tool_reference", "tool_name": "Later"},
                            {"type": "tool_reference", "tool_name": "Never"},
                        ],
                    }
                ],
            },
        ],
        [
            {
                "role": "system",
                "content": [
                    {"type": "text", "text": "Tools have changed."},
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Later"}},
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}},
                    {
                        "type": "tool_addition",
                        "tool": {"type": "tool_definition", "definition": {"name": "New", "input_schema": {}}},
                    },
                ],
            },
            {"role": "user", "content": "Go on."},
        ],
        [
            {"role": "assistant", "content": "Done."},
            {
                "role": "system",
                "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Bash"}}],
            },
            {"role": "user", "content": [{"type": "text", "text": "Thanks."}]},
        ],
    ]
    for messages in accumulate(turns):
        yield {**common, "messages": messages}
    yield {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}


def opencode() -> Iterator[Body]:
    """``POST /v1/chat/completions``."""
    functions = [
        {"name": "bash", "description": "Runs.", "parameters": {"$schema": "x", **SCHEMA}},
        {"name": "read", "parameters": SCHEMA, "strict": True},
        {"name": "none"},
    ]
    common = {
        "tools": [{"type": "function", "function": each} for each in functions], "tool_choice": "auto",
        "reasoning_effort": "low",
    }  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"path": "é"})}}
    turns: list[list[Body]] = [
        [{"role": "system", "content": "You are opencode.\n" + TEXT}, {"role": "user", "content": TEXT}],
        [
            {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1", "cache_control": {}}]},
        ],
        [
            {"role": "assistant", "content": None, "reasoning": "Hm!", "tool_calls": [{**call, "id": "c2"}, call]},
            {"role": "tool", "tool_call_id": "c2", "content": "2", "name": "bash"},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ],
        [
            {"role": "assistant", "content": [{"type": "text", "text": "Well"}, {"type": "refusal", "refusal": "no"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": TEXT, "name": "n"}, {"type": "text", "text": ""}],
            },
        ],
    ]
    for messages in accumulate(turns):
        yield {**common, "messages": messages}


SESSIONS = {"/v1/responses": codex, "/v1/messages": claude_code, "/v1/chat/completions": opencode}
