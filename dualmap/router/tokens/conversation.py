"""The conversation of a chat request, in the form in which vLLM gives it to a model's chat template.

vLLM does not hand messages over as they were sent: content parts become a string (or stay a list, where the template
iterates over them), arguments of tool calls are parsed, absent fields are left out. A template's output, and with it
every token, depends on these details. Source: vLLM 0.32, ``renderers/chat_utils.py`` and the request models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from dualmap.scheduling.values import value

ContentFormat = Literal["string", "openai"]
"""Form in which a template expects a message's content: a string, or a list of parts."""

_MEDIA: Final = {
    "audio_embeds": "audio", "audio_url": "audio", "image_embeds": "image", "image_pil": "image", "image_url": "image",
    "input_audio": "audio", "input_image": "image", "video_embeds": "video", "video_url": "video",
}  # fmt: skip
"""Parts that are no text, and what templates call them."""
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_KNOWN_PART_FIELDS: Final = frozenset(
    {
        "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
        "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
    }
)  # fmt: skip
"""Fields that some kind of part has; a text part keeps any other."""
TEMPLATE_FIELDS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "reasoning_effort",
        "tools",
    }
)
"""Fields of a body that change what a template is rendered with, besides the messages."""
_USUAL_VARIABLES: Final = {"add_generation_prompt": True, "continue_final_message": False}
_BILLING_HEADER: Final = "x-anthropic-billing-header"
"""A line that one client puts before its system prompt; it differs in every request, and vLLM drops it."""

Message = dict[str, Any]


class UntokenizedError(Exception):
    """The fleet cannot compute the tokens of this request; the message says why."""


@value
class TemplateInput:
    """The input that a chat template is rendered with."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    """``add_generation_prompt``, and all others."""


def template_input(
    body: Mapping[str, Any],
    content_format: ContentFormat,
    default_variables: Mapping[str, Any],
    *,
    validated: bool = True,
) -> TemplateInput:
    """The input with which vLLM renders a chat completions body; ``default_variables`` are the server's own.
    ``validated``: it is one for vLLM, too, whose validation orders the fields of tool calls; the chat of a response is
    not.

    Raises:
        UntokenizedError: the body has parts that are not known, a template of its own, or a shape that vLLM refuses.
    """
    as_text = content_format == "string"
    messages: list[Message] = []
    for message in body["messages"]:
        role, sent = message["role"], message.get("content")
        usual = len(message) == 2 and type(sent) is str and role != "developer"
        if usual and as_text and not sent.startswith(_BILLING_HEADER):  # as most are
            messages.append({"role": role, "content": sent})
        else:
            messages.append(_message(message, content_format, validated=validated))
    if TEMPLATE_FIELDS.isdisjoint(body):  # as most are
        return TemplateInput(messages, None, {**default_variables, **_USUAL_VARIABLES})
    if body.get("chat_template") is not None:
        raise UntokenizedError("the request has its own chat template")
    effort = body.get("reasoning_effort")
    own = body.get("chat_template_kwargs") or {}
    if not isinstance(own, Mapping):
        raise UntokenizedError("chat_template_kwargs is no object")
    given = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        given["enable_thinking"] = effort != "none"
    set_here = {name: value for name, value in given.items() if value is not None and value != "auto"}
    tools = body.get("tools")
    return TemplateInput(messages, None if tools is None else _tools(tools), {**default_variables, **own, **set_here})


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list):
        raise UntokenizedError("tools is no array")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as vLLM's model of the request writes it: known fields only, in its order."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UntokenizedError("a tool is no function with a name")
    deferred = tool.get("defer_loading")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    fields |= {name: value for name, value in optional.items() if value is not None}
    written: dict[str, Any] = {"type": "function", "function": fields}
    if deferred is not None:
        written["defer_loading"] = deferred
    return written


def _message(message: Mapping[str, Any], content_format: ContentFormat, *, validated: bool) -> Message:
    role, sent = message["role"], message.get("content")
    parts = _text_parts(sent)
    if role == "system":
        parts = _without_billing_header(parts)
    content: Any = parts if content_format == "openai" else "\n".join(filter(None, map(_shown, parts)))
    written: Message = {"role": role, "content": content}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            written["tool_calls"] = [_call(call, validated=validated) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            written["reasoning"] = written["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            written["tool_call_id"] = message["tool_call_id"]
        if isinstance(content, list) and all(part["type"] == "text" for part in content):
            written["content"] = "\n".join(map(_shown, parts))
    elif role == "developer":
        written["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            written[name] = message[name]
    return written


def _shown(part: Mapping[str, Any]) -> str:
    """The part in a string: its text, or the tool that it refers to. A medium has none here."""
    text: str = part.get("text", part.get("name", ""))
    return text


def first_media(messages: Sequence[Any]) -> int:
    """Place of the first message with media; the number of messages if none has any."""
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in _MEDIA for part in content):
            return place
    return len(messages)


def _text_parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [written for part in content if (written := _text_part(part)) is not None]


def _text_part(part: Any) -> dict[str, Any] | None:
    """None for a part without text, which vLLM leaves out."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type")
    if kind in _MEDIA:
        return {"type": _MEDIA[kind]}
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    if kind not in _TEXT_PARTS:
        raise UntokenizedError(f"a content part is {kind!r}, not text")
    text = part.get(kind) if kind in ("refusal", "thinking") else part.get("text")
    if text is None:
        return None
    if not isinstance(text, str):
        raise UntokenizedError("the text of a content part is no string")
    extra = {name: value for name, value in part.items() if name not in _KNOWN_PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _without_billing_header(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = []
    for part in parts:
        if not part.get("text", "").startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := part["text"].partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


def _call(call: Any, *, validated: bool) -> dict[str, Any]:
    """A tool call, its arguments as an object: what is no JSON object is an empty one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise UntokenizedError("a tool call is not one of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = None
    if not isinstance(arguments, dict):
        arguments = {}
    written = {**function, "arguments": arguments}
    if not validated:
        return {**call, "function": written}
    return _ordered({**call, "function": _ordered(written, ("arguments", "name"))}, ("id", "function", "type"))


def _ordered(fields: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """The fields, those of ``first`` that are there in its order before the others."""
    return {name: fields[name] for name in (*(name for name in first if name in fields), *fields)}
