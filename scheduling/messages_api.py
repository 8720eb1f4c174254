"""Bodies of Anthropic's messages API as the chat completions that vLLM makes of them.

A conversation meets its KV cache over either API only if both are cut alike, so this follows vLLM's own conversion
field by field (0.32, ``entrypoints/anthropic/serving.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from scheduling.errors import PromptError

_BILLING_HEADER: Final = "x-anthropic-billing-header"
"""A system block that one client sends; it differs in every request, and vLLM drops it."""

Message = dict[str, Any]


def chat_of_message(body: Mapping[str, Any], *, system_first: bool = False) -> dict[str, Any]:
    """The chat completions body: those of its fields that a prompt depends on.

    ``system_first``: the model's template allows no system message but the first, so all become one.

    Raises:
        PromptError: ``messages`` or a part of it has the wrong shape.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise PromptError("messages must be a non-empty array of objects", "messages")
    messages: list[Message] = []
    system = _texts(body.get("system"), "system")
    for index, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"messages[{index}] must be an object with a role", f"messages[{index}]")
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
    if (effort := _effort(body)) is not None:
        chat["reasoning_effort"] = effort
    tools = body.get("tools")
    if tools is not None:
        chat["tools"] = _tools(tools)
    return chat


def _effort(body: Mapping[str, Any]) -> Any:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return "none"
    return output.get("effort") if isinstance(output, dict) else None


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise PromptError("'tools' must be an array", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: Any, param: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise PromptError(f"{param} must be an object", param)
    named = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    return {
        "type": "function",
        "function": {there: tool[here] for here, there in named.items() if tool.get(here) is not None},
    }


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
    references = [item for item in items if item.get("type") == "tool_reference"]
    if references:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})
