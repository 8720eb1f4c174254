"""Kinds of requests by what they are made of: an engine renders those of one kind alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import itemgetter
from typing import Any, Final

from dualmap.router.prompts.inference_request import TokenSource

RequestKind = frozenset[str]

_FIELDS: Final = frozenset(
    {
        "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents", "instructions",
        "output_config", "reasoning", "reasoning_effort", "system", "thinking", "tools", "truncation",
    }
)  # fmt: skip
_MESSAGE_FIELDS: Final = frozenset({"name", "namespace", "reasoning", "reasoning_content", "status", "tools"})
_MAX_CHARS: Final = 40
_TYPE: Final = itemgetter("type")


def kind_of(source: TokenSource) -> RequestKind:
    """Path, and all that its parts are called."""
    return kind_of_frame(source) | kind_of_messages(source)


def kind_of_frame(source: TokenSource) -> RequestKind:
    """Path, and all that the parts are called which are not in messages or items."""
    fields = source.fields
    found = {source.path, *_given(fields, _FIELDS)}
    choice = fields.get("tool_choice")
    if isinstance(choice, str):
        found.add(f"tool choice {choice[:_MAX_CHARS]}")
    found.update([f"tool {name}" for name in _types(fields.get("tools"))])
    return frozenset(found)


def kind_of_messages(source: TokenSource) -> RequestKind:
    """Path, and all that the parts of the messages, or items, are called."""
    found = {source.path}
    for name in ("messages", "input"):
        _add_messages(found, source.fields.get(name))
    return frozenset(found)


def _add_messages(found: set[str], listed: Any) -> None:
    if not isinstance(listed, list):
        return
    for message in listed:
        if not isinstance(message, dict):
            continue
        role, content = message.get("role"), message.get("content")
        if len(message) == 2 and type(role) is type(content) is str and role in found:  # as most are
            continue
        _add_message(found, message)


def _given(fields: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """The fields of these names that have a value."""
    return [name for name in fields.keys() & names if fields[name] is not None]


def _add_message(found: set[str], message: Mapping[str, Any]) -> None:
    for name in ("role", "type"):
        called = message.get(name)
        if isinstance(called, str):
            found.add(called[:_MAX_CHARS])
    content = message.get("content")
    if not isinstance(content, str):
        found.update(_types(content) if content is not None else ("no content",))
        if isinstance(content, list):
            found.update([f"in result {name}" for part in content if isinstance(part, dict) for name in _inner(part)])
    if len(message) > 2:
        found.update(_given(message, _MESSAGE_FIELDS))
        found.update([f"call {name}" for name in _types(message.get("tool_calls"))])
        found.update([f"output {name}" for name in _types(message.get("output"))])


def _inner(part: Mapping[str, Any]) -> Collection[str]:
    content = part.get("content")
    return ("text",) if isinstance(content, str) else _types(content)


def _types(listed: Any) -> Collection[str]:
    """The types of the objects in a list."""
    if not isinstance(listed, list) or not listed:
        return ()
    try:
        found = {*map(_TYPE, listed)}
    except (KeyError, TypeError):  # some have none
        found = {None, *[called for each in listed if isinstance(called := _type_of(each), str)]}
    return [called[:_MAX_CHARS] if isinstance(called, str) else "without type" for called in found]


def _type_of(each: Any) -> Any:
    return each.get("type") if isinstance(each, dict) else None
