"""Kinds of requests by what they are made of: an engine renders those of one kind alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dualmap.router.prompts.inference_request import TokenSource

RequestKind = frozenset[str]

_FIELDS: Final = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "instructions",
    "output_config", "reasoning", "reasoning_effort", "system", "thinking", "tools", "truncation",
)  # fmt: skip
_MESSAGE_FIELDS: Final = ("name", "namespace", "reasoning", "reasoning_content", "status", "tools")
_MAX_CHARS: Final = 40


def kind_of(source: TokenSource) -> RequestKind:
    """Path, and all that its parts are called."""
    fields = source.fields
    found = {source.path, *(name for name in _FIELDS if fields.get(name) is not None)}
    choice, tools = fields.get("tool_choice"), fields.get("tools")
    if isinstance(choice, str):
        found.add(f"tool choice {choice[:_MAX_CHARS]}")
    found |= {f"tool {name}" for name in _types(tools)}
    for listed in (fields.get("messages"), fields.get("input")):
        if isinstance(listed, list):
            for message in listed:
                if not isinstance(message, dict):
                    continue
                role, content = message.get("role"), message.get("content")
                if len(message) == 2 and type(role) is type(content) is str and role in found:  # as most are
                    continue
                _add_message(found, message)
    return frozenset(found)


def _add_message(found: set[str], message: Mapping[str, Any]) -> None:
    for name in ("role", "type"):
        called = message.get(name)
        if isinstance(called, str):
            found.add(called[:_MAX_CHARS])
    content = message.get("content")
    if not isinstance(content, str):
        found.update(_types(content) if content is not None else ("no content",))
        if isinstance(content, list):
            found.update(f"in result {name}" for part in content if isinstance(part, dict) for name in _inner(part))
    if len(message) > 2:
        found.update(name for name in _MESSAGE_FIELDS if message.get(name) is not None)
        found.update(f"call {name}" for name in _types(message.get("tool_calls")))
        found.update(f"output {name}" for name in _types(message.get("output")))


def _inner(part: Mapping[str, Any]) -> Iterator[str]:
    content = part.get("content")
    return iter(("text",)) if isinstance(content, str) else _types(content)


def _types(listed: Any) -> Iterator[str]:
    if not isinstance(listed, list):
        return
    for each in listed:
        called = each.get("type") if isinstance(each, dict) else None
        yield called[:_MAX_CHARS] if isinstance(called, str) else "without type"
