"""The whole answer of a chat or a completion, out of the events of its stream: as its engine would have sent it.

What events have of a choice is put together by kind: text is joined, lists of parts with an ``index`` by that, other
lists are appended, and of everything else the last value that is not null counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

CHAT_OBJECT: Final = "chat.completion"
COMPLETION_OBJECT: Final = "text_completion"
_NAMES: Final = frozenset({"id", "type", "role", "object", "finish_reason", "stop_reason", "name"})
"""Texts that are not joined. Of a tool call's name engines send the whole in one event, or in each."""


def whole_answer(events: Iterable[Mapping[str, Any]], *, chat: bool) -> dict[str, Any] | None:
    """The answer; None where an event is an error, or no choice has ended."""
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if "error" in event or not isinstance(event.get("choices"), list):
            return None
        for name, value in event.items():
            if name != "choices" and (value is not None or name not in whole):
                whole[name] = value
        for part in event["choices"]:
            _join(choices.setdefault(part["index"], {}), {**part, "index": part["index"]})
    if not choices or any(each.get("finish_reason") is None for each in choices.values()):
        return None
    whole["object"] = CHAT_OBJECT if chat else COMPLETION_OBJECT
    whole["choices"] = [_as_whole(choices[index], chat=chat) for index in sorted(choices)]
    whole.setdefault("usage", None)
    return whole


def _as_whole(choice: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    if not chat:
        return choice
    message = choice.pop("delta", {})
    if message.get("tool_calls") and not message.get("content"):
        message["content"] = None  # a stream begins with an empty text
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
    return {"index": choice.pop("index"), "message": {"role": "assistant", "content": None} | message} | choice


def _join(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        former = whole.get(name)
        if value is None:
            whole.setdefault(name, None)
        elif former is None or name in _NAMES or type(former) is not type(value):
            whole[name] = _copy(value)
        elif isinstance(value, str):
            whole[name] = former + value
        elif isinstance(value, dict):
            _join(former, value)
        elif isinstance(value, list):
            _append(former, value)
        else:
            whole[name] = value


def _append(whole: list[Any], parts: list[Any]) -> None:
    for part in parts:
        index = part.get("index") if isinstance(part, dict) else None
        same = next((each for each in whole if each.get("index") == index), None) if index is not None else None
        if same is None:
            whole.append(_copy(part))
        else:
            _join(same, part)


def _copy(value: Any) -> Any:
    """The value, which may be changed."""
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value
