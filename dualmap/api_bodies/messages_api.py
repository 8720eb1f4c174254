"""Bodies of Anthropic's messages API as the chat completions that vLLM makes of them.

A conversation meets its KV cache over either API only if both are cut alike, so this follows vLLM's own conversion
field by field (0.32, ``entrypoints/anthropic/serving.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dualmap.api_bodies.errors import PromptError

_BILLING_HEADER: Final = "x-anthropic-billing-header"
"""The begin of a text that one client sends before its system prompt; it differs in every request. Of blocks, and of
system messages within the conversation, vLLM drops such a text whole; of a system prompt that is one text its chats
drop the first line (``api_bodies.prompt``)."""

_TOOL_FIELDS: Final = {
    "name": "name", "description": "description", "input_schema": "parameters", "strict": "strict",
    "defer_loading": "defer_loading",
}  # fmt: skip
_TOOL_CHANGES: Final = ("tool_addition", "tool_removal")

Message = dict[str, Any]


def chat_of_message(
    body: Mapping[str, Any],
    *,
    system_first: bool = False,
    unthinking_effort: str = "none",
    begins: list[int] | None = None,
) -> dict[str, Any]:
    """The chat completions body: those of its fields that a prompt depends on.

    ``system_first``: the model's template allows no system message but the first, so all become one.
    ``unthinking_effort``: the effort that the template is given where thinking is disabled.
    ``begins`` gets, for each message of the body, the number of messages of the chat before those that it becomes.

    Raises:
        PromptError: ``messages`` or a part of it has the wrong shape.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise PromptError("messages must be a non-empty array of objects", "messages")
    messages: list[Message] = []
    given_system = body.get("system")
    system = [given_system] if given_system and isinstance(given_system, str) else _texts(given_system, "system")
    for index, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"messages[{index}] must be an object with a role", f"messages[{index}]")
        if begins is not None:
            begins.append(len(messages) + bool(system))
        if message["role"] != "system":
            _add(messages, message, f"messages[{index}].content")
            continue
        texts = _texts(message.get("content"), f"messages[{index}].content")
        if system_first:
            system += texts
        elif texts:
            messages.append({"role": "system", "content": "".join(texts)})
    if system:
        messages.insert(0, {"role": "system", "content": "".join(system)})
    chat: dict[str, Any] = {"messages": messages}
    for name in ("chat_template_kwargs", "cache_salt"):
        if body.get(name) is not None:
            chat[name] = body[name]
    if (effort := _effort(body, unthinking_effort)) is not None:
        chat["reasoning_effort"] = effort
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise PromptError("'tools' must be an array", "tools")
    changes = list(_tool_changes(given))
    if changes:
        tools = _changed_tools(tools or [], changes)
    if tools is not None:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    return chat


def _effort(body: Mapping[str, Any], unthinking: str) -> Any:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return unthinking
    return output.get("effort") if isinstance(output, dict) else None


def _tool_changes(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Additions and removals of tools within the conversation, which system messages have: kind and tool."""
    for message in messages:
        content = message.get("content")
        if message["role"] != "system" or not isinstance(content, list):
            continue
        for block in content:
            if isinstance(block, dict) and block.get("type") in _TOOL_CHANGES and isinstance(block.get("tool"), dict):
                yield block["type"], block["tool"]


def _changed_tools(tools: Sequence[Any], changes: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """The tools at the conversation's end, which vLLM shows from its start: a changed list is another prompt."""
    known = {tool["name"]: tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)}
    removed: set[str] = set()
    for kind, change in changes:
        defined = change.get("definition")
        name = (defined if isinstance(defined, dict) else change).get("name")
        if not isinstance(name, str):
            continue
        if isinstance(defined, dict):
            known[name] = defined
        elif kind == "tool_addition" and name in known:
            known[name] = {**known[name], "defer_loading": None}
        if kind == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in known.items() if name not in removed]


def _tool(tool: Any, param: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise PromptError(f"{param} must be an object", param)
    function = {there: tool[here] for here, there in _TOOL_FIELDS.items() if tool.get(here) is not None}
    schema = function.get("parameters")
    if isinstance(schema, dict) and "type" not in schema:
        function["parameters"] = {**schema, "type": "object"}
    return {"type": "function", "function": function}


def _texts(content: Any, param: str) -> list[str]:
    """The texts of a system prompt: a string, or an array of text blocks."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        blocks: Sequence[Any] = ({"type": "text", "text": content},)
    elif isinstance(content, list):
        blocks = content
    else:
        raise PromptError(f"{param} must be a string or an array of blocks", param)
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(_BILLING_HEADER)]


def _add(messages: list[Message], message: Mapping[str, Any], param: str) -> None:
    """A message; results of tools become messages of their own before it."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    if not isinstance(content, list):
        raise PromptError(f"{param} must be a string or an array of blocks", param)
    written: Message = {"role": role}
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise PromptError(f"{param}[{index}] must be an object", f"{param}[{index}]")
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            parts.append(_image(block["source"]))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            reasoning.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            if role == "user":
                _add_result(messages, block)
            else:
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
    if reasoning:
        written["reasoning"] = "".join(reasoning)
    if calls:
        written["tool_calls"] = calls
    if parts:
        written["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or "content" in written:
        messages.append(written)


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id") or "call", "type": "function", "function": function}


def _image(source: Any) -> dict[str, Any]:
    if not isinstance(source, dict):
        source = {}
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _add_result(messages: list[Message], block: Mapping[str, Any]) -> None:
    content, call_id = block.get("content"), block.get("tool_use_id") or ""
    items = [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join([each for each in texts if isinstance(each, str)])
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    images = [_image(item.get("source")) for item in items if item.get("type") == "image"]
    if images:
        messages.append({"role": "user", "content": images})
    references = [
        {"type": "tool_reference", "name": name}
        for item in items
        if item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name"))
    ]
    if references:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})
