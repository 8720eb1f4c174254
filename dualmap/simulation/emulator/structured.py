"""Structured output and tool calls: requested forms of an answer other than made-up words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualmap.simulation.emulator.errors import bad_request, invalid, missing, not_emulated
from dualmap.simulation.emulator.fields import Body, flag, mapping, objects, word
from dualmap.simulation.emulator.json_samples import json_sample

MakeText = Callable[[int], str]
"""An answer's text from its seed."""

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_UNFIT = ("[1, 2]", '"a text"', "7", "null")
_ANY_OBJECT = {"type": "object", "properties": {"answer": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: object
    strict: bool = False
    """Arguments fit the schema. Without it vLLM holds a model to JSON alone."""

    def arguments(self, seed: int) -> str:
        """Arguments from a seed: one of four, where they are not strict, is JSON that no schema of arguments allows."""
        if not self.strict and seed % 4 == 3:
            return _UNFIT[seed // 4 % len(_UNFIT)]
        return json_sample(self.parameters, seed)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the answer must be."""

    tool: Tool
    finish_reason: str
    """Finish reason of a complete call: vLLM says ``stop`` when the function was named by the request."""


def read_output_format(payload: Body) -> MakeText | None:
    """``response_format`` and vLLM's ``structured_outputs``; None: made-up words. Raises ApiError."""
    wanted = mapping(payload, "response_format")
    if wanted is not None:
        kind = word(wanted, "type", _FORMATS, "response_format")
        if kind is None:
            raise missing("response_format.type", wanted)
        if kind == "structural_tag":
            raise not_emulated("response_format structural_tag")
        if kind == "json_schema":
            described = wanted.get("json_schema")
            if not isinstance(described, Mapping):
                message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
                raise bad_request(message, "response_format")
            return json_text(described.get("schema"))
        if kind == "json_object":
            return json_text(None)
    return _structured(mapping(payload, "structured_outputs") or {})


def json_text(schema: object) -> MakeText:
    """JSON that fits a schema (None: any object). Raises ApiError if the emulator cannot make it."""
    schema = _ANY_OBJECT if schema is None else schema
    json_sample(schema, 0)
    return lambda seed: json_sample(schema, seed)


def read_chat_tools(payload: Body) -> ToolCall | None:
    """``tools`` and ``tool_choice`` of a chat: the call that is requested, if one is. Raises ApiError.

    Where the choice is the model's own, it never calls.
    """
    tools = _chat_tools(payload)
    choice = payload.get("tool_choice")
    if choice is None:
        return None
    if not tools:
        if choice == "none":
            return None
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request(
                f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are '
                "supported.",
                "tool_choice",
            )
        return checked(ToolCall(tools[0], "tool_calls")) if choice == "required" else None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise invalid("tool_choice.function.name", "missing", "Field required", choice)
    found = named(tools, name)
    if found is None:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise bad_request(message, "tool_choice")
    return checked(ToolCall(found, "stop"))


def checked(call: ToolCall) -> ToolCall:
    """The call itself. Raises ApiError if arguments for it cannot be made."""
    call.tool.arguments(0)
    return call


def named(tools: Sequence[Tool], name: str) -> Tool | None:
    return next((tool for tool in tools if tool.name == name), None)


def parameters_of(definition: Mapping[str, Any], name: str) -> object:
    """The schema of a function's arguments."""
    schema = definition.get(name)
    return schema if schema else {"type": "object"}


def _chat_tools(payload: Body) -> list[Tool]:
    listed = objects(payload, "tools")
    if listed is None:
        return []
    if not listed:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise bad_request(message, "tools")
    tools: list[Tool] = []
    for index, each in enumerate(listed):
        function = each.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise missing(f"tools.{index}.function.name", each)
        tools.append(Tool(function["name"], parameters_of(function, "parameters"), function.get("strict") is True))
    return tools


def _structured(wanted: Body) -> MakeText | None:
    for name in ("regex", "grammar", "structural_tag"):
        if wanted.get(name) is not None:
            raise not_emulated(f"structured_outputs.{name}")
    if wanted.get("json") is not None:
        return json_text(wanted["json"])
    if flag(wanted, "json_object"):
        return json_text(None)
    choices = wanted.get("choice")
    if choices is None:
        return None
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise bad_request("structured_outputs.choice must be a list of strings.", "structured_outputs")
    return lambda seed: str(choices[seed % len(choices)])
