"""Bodies of OpenAI's responses API as the chat completions that vLLM makes of them.

As ``api_bodies.messages_api`` does, after vLLM 0.32, ``entrypoints/openai/responses/utils.py``. What a stored response
held before (``previous_response_id``) only its instance knows; the chat has the new items alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dualmap.api_bodies.errors import PromptError

_PARTIAL: Final = ("in_progress", "incomplete")
_CALLS: Final = ("function_call", "custom_tool_call")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")

_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict", "defer_loading")
_FREE_TEXT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool, which takes one text."""

Message = dict[str, Any]


def chat_of_response(body: Mapping[str, Any], *, begins: list[int] | None = None) -> dict[str, Any]:
    """The chat completions body: those of its fields that a prompt depends on. ``begins`` gets, for each item, the
    number of messages of the chat before it, one that it becomes a part of among them.

    Raises:
        PromptError: ``input`` or an item of it has the wrong shape.
    """
    messages: list[Message] = []
    instructions, given = body.get("instructions"), body.get("input")
    if instructions and isinstance(instructions, str):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        items: list[Message] = []
        for index, item in enumerate(given):
            if not isinstance(item, dict):
                raise PromptError(f"input[{index}] must be an object", f"input[{index}]")
            if begins is not None:
                begins.append(len(messages) + len(items))
            _add(items, item, f"input[{index}]")
        messages += items
    else:
        raise PromptError("input must be a non-empty string or array", "input")
    continued = isinstance(given, list) and is_partial(given[-1])
    chat: dict[str, Any] = {"messages": messages}
    if continued:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    for name in ("chat_template_kwargs", "cache_salt"):
        if body.get(name) is not None:
            chat[name] = body[name]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    tools = body.get("tools")
    if tools:
        chat["tools"] = _tools(tools)
    return chat


def is_partial(item: Mapping[str, Any]) -> bool:
    """Whether the item, where it is the last one, is continued by the answer."""
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in _PARTIAL


def is_part_of_answer(item: Mapping[str, Any]) -> bool:
    """Whether the item is a part of an answer without text: a message behind it becomes one with it."""
    return item.get("type") in (*_CALLS, "reasoning")


def _tools(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise PromptError("'tools' must be an array", "tools")
    return [
        {"type": "function", "function": function}
        for tool in tools
        if isinstance(tool, dict)
        for function in _functions(tool)
    ]


def _functions(tool: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The functions as which a model is shown the tool. vLLM shows it none of the tools that a server would run."""
    kind, listed = tool.get("type"), tool.get("tools")
    if kind == "function":
        yield _function(tool)
    elif kind == "custom":
        yield _function({"name": tool.get("name"), "description": tool.get("description"), "parameters": _FREE_TEXT})
    elif kind == "namespace" and isinstance(listed, list):
        for each in listed:
            if isinstance(each, dict) and each.get("type") == "function":
                yield {**_function(each), "name": _flat_name(tool.get("name"), each.get("name"))}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}


def _flat_name(namespace: Any, name: Any) -> Any:
    return f"{namespace}__{name}" if namespace else name


def _add(messages: list[Message], item: Mapping[str, Any], param: str) -> None:
    """An item as a message, or as a part of the answer before it."""
    kind, role = item.get("type"), item.get("role")
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in _CALLS:
        call = {"id": item.get("call_id"), "function": _called(item), "type": "function"}
        if before is not None:
            before.setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "tool_calls": [call]})
    elif kind == "reasoning":
        _add_to_answer(messages, before, "reasoning", _reasoning(item))
    elif kind in _OUTPUTS:
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif role == "assistant" and (text := _answer_text(item.get("content"))) is not None:
        _add_to_answer(messages, before, "content", text)
    elif isinstance(role, str):
        messages.append({"role": role, "content": item.get("content")})
    elif isinstance(kind, str):  # nothing that vLLM renders: it is told apart by its content, as media are
        messages.append({"role": "item", "content": [dict(item)]})
    else:
        raise PromptError(f"{param} must have a role or a type", param)


def _called(item: Mapping[str, Any]) -> dict[str, Any]:
    """The function that a call names, with its arguments as JSON."""
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
        return {"name": item.get("name"), "arguments": arguments}
    return {"name": _flat_name(item.get("namespace"), item.get("name")), "arguments": item.get("arguments")}


def _add_to_answer(messages: list[Message], before: Message | None, name: str, text: str) -> None:
    if before is not None and before.get(name) is None:
        before[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _reasoning(item: Mapping[str, Any]) -> str:
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts and isinstance(parts[0], dict):
            text = parts[0].get("text")
            return text if isinstance(text, str) else ""
    return ""


def _answer_text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], dict):
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None
