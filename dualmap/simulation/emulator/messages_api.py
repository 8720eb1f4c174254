"""Anthropic's messages: reading them, and answering as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import xxhash

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.simulation.emulator.errors import ApiError, bad_request, invalid, missing
from dualmap.simulation.emulator.fields import Body, mapping, objects, required, text, word
from dualmap.simulation.emulator.generation_request import (
    GenerationRequest,
    Limits,
    Sampling,
    generation,
    read_max_tokens,
    read_stop,
)
from dualmap.simulation.emulator.openai_api import cache_scope, check_model
from dualmap.simulation.emulator.replies import Ended, Stamp, Usage, named_event
from dualmap.simulation.emulator.structured import MakeText, Tool, ToolCall, checked, json_text, named, parameters_of
from dualmap.simulation.workload.tokenizer import PromptText, render_chat

_ROLES = ("user", "assistant", "system")


def read_message(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, MessageReply]:
    """A request for a message. Raises ApiError."""
    _require_model(payload)
    max_tokens = required(payload, "max_tokens")
    if isinstance(max_tokens, int) and max_tokens <= 0:
        raise invalid("max_tokens", "value_error", "Value error, max_tokens must be positive", max_tokens)
    check_model(payload, limits)
    prompt = message_prompt(payload)
    call = _read_tool_choice(payload)
    sampling = Sampling(
        max_tokens=read_max_tokens(payload, ("max_tokens",), limits),
        stop=read_stop(payload, "stop_sequences"),
        given=call.tool.arguments if call is not None else _read_format(payload),
    )
    gen_request = generation([prompt], sampling, limits, cache_scope(payload, limits))
    return gen_request, MessageReply(gen_request, stamp, call, limits.block_tokens)


def read_count(payload: Body, limits: Limits) -> PromptText:
    """The prompt whose tokens are to be counted. Raises ApiError."""
    _require_model(payload)
    check_model(payload, limits)
    return message_prompt(payload)


def message_prompt(payload: Body) -> PromptText:
    """The input that the model sees for ``system``, ``messages`` and ``tools``. Raises ApiError."""
    required(payload, "messages")
    given = objects(payload, "messages") or ()
    for index, message in enumerate(given):
        _check_message(message, index)
    if not given:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    if payload.get("system"):
        _check_content(payload["system"], "system")
    try:
        chat = chat_of_message(payload)
        return render_chat(chat["messages"], chat.get("tools"))
    except (PromptError, ValueError) as error:
        raise invalid("messages", "value_error", f"Value error, {error}", given) from error


class MessageReply:
    """One message: a text, or the use of a tool."""

    def __init__(self, gen_request: GenerationRequest, stamp: Stamp, call: ToolCall | None, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.answer_id = f"chatcmpl-{stamp.request_id}"
        self._prompt_tokens = gen_request.prompt_tokens
        self._script = gen_request.choices[0].script
        self._stamp = stamp
        self._call = call

    def engine_id(self, prompt: int) -> str:
        return self.answer_id

    def opening(self) -> bytes:
        return b""

    def begin(self) -> bytes:
        message = {
            **self._message([]),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._prompt_tokens, "output_tokens": 0},
        }
        block = {"type": "text", "text": ""} if self._call is None else self._use(self._call, {})
        return named_event({"type": "message_start", "message": message}) + named_event(
            {"type": "content_block_start", "content_block": block, "index": 0}
        )

    def delta(self, choice: int, start: int, count: int) -> bytes:
        piece = self._script.text(start, count)
        if not piece:
            return b""
        if self._call is None:
            delta = {"type": "text_delta", "text": piece}
        else:
            delta = {"type": "input_json_delta", "partial_json": piece}
        return named_event({"type": "content_block_delta", "delta": delta, "index": 0})

    def end(self, choice: int, start: int, ended: Ended) -> bytes:
        last = self.delta(choice, start, ended.tokens - start)
        return last + named_event({"type": "content_block_stop", "index": 0})

    def closing(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        reason, sequence = self._stop(ends[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return named_event({"type": "message_delta", "delta": delta, "usage": self._usage(usage)}) + named_event(
            {"type": "message_stop"}
        )

    def broken(self, error: ApiError) -> bytes:
        return named_event({"type": "error", "error": {"type": "internal_error", "message": error.message}})

    def whole(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        """Raises ApiError: the model called a tool by what is no object."""
        said = self._script.text(0, ends[0].tokens)
        content: list[dict[str, Any]] = []
        if self._call is None:
            content.append({"type": "text", "text": said})
        elif ends[0].finish_reason == "stop":  # a call that was cut short does not count
            try:
                arguments = orjson.loads(said)
            except orjson.JSONDecodeError:  # a stop sequence cut it
                arguments = None
            if not isinstance(arguments, dict):
                raise bad_request(f"1 validation error for AnthropicContentBlock: input: {said} is no dictionary")
            content.append(self._use(self._call, arguments))
        reason, sequence = self._stop(ends[0])
        answer = {**self._message(content), "usage": self._usage(usage)}
        if reason is not None:  # one that was aborted has none
            answer["stop_reason"] = reason
        if sequence is not None:
            answer["stop_sequence"] = sequence
        return orjson.dumps(answer)

    def refusal(self, error: ApiError) -> bytes:
        return error.anthropic_body()

    def _stop(self, ended: Ended) -> tuple[str | None, str | None]:
        if ended.finish_reason != "stop":
            return ("max_tokens" if ended.finish_reason == "length" else None), None
        if self._call is not None:
            return "tool_use", None
        if self._script.stop_reason is not None:
            return "stop_sequence", self._script.stop_reason
        return "end_turn", None

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The prompt's tokens in three parts: read from the cache, put there in whole blocks, and the rest."""
        created = usage.created_tokens(self._block_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - created,
            "output_tokens": usage.completion_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._stamp.model
        return {"id": self.answer_id, "type": "message", "role": "assistant", "content": content, "model": model}

    def _use(self, call: ToolCall, arguments: object) -> dict[str, Any]:
        use_id = f"chatcmpl-tool-{xxhash.xxh3_64_hexdigest(self.answer_id.encode())}"
        return {"type": "tool_use", "id": use_id, "name": call.tool.name, "input": arguments}


def _require_model(payload: Body) -> None:
    if not text(payload, "model"):
        raise missing("model", payload)


def _check_message(message: Mapping[str, Any], index: int) -> None:
    if word(message, "role", _ROLES, f"messages.{index}") is None:
        raise missing(f"messages.{index}.role", message)
    if message.get("content") is None:
        raise missing(f"messages.{index}.content", message)
    _check_content(message["content"], f"messages.{index}.content")


def _check_content(content: object, location: str) -> None:
    """A text, or a list of blocks."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise invalid(location, "string_type", "Input should be a valid string or a list of blocks", content)


def _read_tool_choice(payload: Body) -> ToolCall | None:
    """``any`` and a named tool are calls; where no tools are listed, vLLM ignores the choice. Raises ApiError."""
    tools: list[Tool] = []
    for index, each in enumerate(objects(payload, "tools") or ()):
        if not isinstance(each.get("name"), str):
            raise missing(f"tools.{index}.name", each)
        if not isinstance(each.get("input_schema"), Mapping):
            raise missing(f"tools.{index}.input_schema", each)
        tools.append(Tool(each["name"], parameters_of(each, "input_schema"), each.get("strict") is True))
    choice = mapping(payload, "tool_choice")
    if choice is None:
        return None
    kind = word(choice, "type", ("auto", "any", "tool", "none"), "tool_choice")
    if not tools or kind not in ("any", "tool"):
        return None
    if kind == "any":
        return checked(ToolCall(tools[0], "tool_use"))
    found = named(tools, str(choice.get("name")))
    if found is None:
        raise bad_request(f"The tool with name '{choice.get('name')}' is not found in the tools list.")
    return checked(ToolCall(found, "tool_use"))


def _read_format(payload: Body) -> MakeText | None:
    wanted = mapping(mapping(payload, "output_config") or {}, "format")
    return None if wanted is None or wanted.get("schema") is None else json_text(wanted["schema"])
