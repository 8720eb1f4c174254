"""OpenAI's responses: reading them, and answering as vLLM does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import orjson
import xxhash

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.simulation.emulator.errors import ApiError, bad_request, invalid, missing, unknown_response
from dualmap.simulation.emulator.fields import Body, flag, integer, mapping, number, objects, required, text, word
from dualmap.simulation.emulator.generation_request import (
    GenerationRequest,
    Limits,
    Sampling,
    generation,
    read_max_tokens,
)
from dualmap.simulation.emulator.openai_api import cache_scope, check_model, without_opening
from dualmap.simulation.emulator.replies import Ended, Stamp, Usage, named_event
from dualmap.simulation.emulator.structured import MakeText, Tool, ToolCall, checked, json_text, named, parameters_of
from dualmap.simulation.workload.tokenizer import PromptText, render_chat

_NO_STORE = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


MAX_STORED = 1000


class StoredResponses:
    """Whole responses by id, the last ``MAX_STORED``; empty unless ``stores``, as in vLLM by default."""

    def __init__(self, *, stores: bool) -> None:
        self._stores = stores
        self._responses: OrderedDict[str, tuple[dict[str, Any], list[Any]]] = OrderedDict()
        """Stored responses, each with the items of the conversation that it ends."""

    def keep_of(self, payload: Body) -> Callable[[dict[str, Any]], None] | None:
        """The callback that keeps the whole response to a request; None if it is not to be stored."""
        wanted = payload.get("store") is None or flag(payload, "store")
        items = _items(payload)
        return (lambda response: self._keep(response, items)) if self._stores and wanted else None

    def _keep(self, response: dict[str, Any], items: list[Any]) -> None:
        self._responses[response["id"]] = response, [*items, *response["output"]]
        if len(self._responses) > MAX_STORED:
            self._responses.popitem(last=False)

    def read(self, response_id: str) -> dict[str, Any]:
        """Raises ApiError."""
        return self._found(response_id)[0]

    def continued(self, payload: Body) -> Body:
        """The request with the conversation before it, where it names a response. Raises ApiError."""
        previous = text(payload, "previous_response_id")
        return payload if previous is None else {**payload, "input": [*self._found(previous)[1], *_items(payload)]}

    def _found(self, response_id: str) -> tuple[dict[str, Any], list[Any]]:
        found = self._responses.get(response_id)
        if found is None:
            raise unknown_response(response_id)
        return found

    def cancel(self, response_id: str) -> None:
        """Raises ApiError: what is stored is complete, as nothing runs in the background."""
        self.read(response_id)
        raise ApiError(400, "invalid_request_error", "Cannot cancel a synchronous response.", "response_id")


def _items(payload: Body) -> list[Any]:
    given = payload.get("input")
    return given if isinstance(given, list) else [{"role": "user", "content": given}]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Fields of the request that the answer repeats."""

    max_output_tokens: int | None
    instructions: str | None
    temperature: float
    _: KW_ONLY
    top_p: float
    tool_choice: object
    tools: Sequence[Mapping[str, Any]]
    text: Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None
    call: ToolCall | None
    previous_response_id: str | None


def read_response(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, ResponseReply]:
    """A request for a response, with the whole conversation. Raises ApiError."""
    check_model(payload, limits)
    if flag(payload, "background"):
        raise ApiError(400, "invalid_request_error", _NO_STORE, "background")
    max_tokens = read_max_tokens(payload, ("max_output_tokens",), limits)
    tools = objects(payload, "tools") or ()
    call = _read_tool_choice(payload, tools)
    temperature, top_p = number(payload, "temperature"), number(payload, "top_p")
    wanted = Wanted(
        max_output_tokens=max_tokens,
        instructions=text(payload, "instructions"),
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        tool_choice=(payload.get("tool_choice") or "auto") if tools else "none",
        tools=tools,
        text=mapping(payload, "text"),
        metadata=mapping(payload, "metadata"),
        call=call,
        previous_response_id=text(payload, "previous_response_id"),
    )
    given = call.tool.arguments if call is not None else _read_format(wanted.text or {})
    sampling = Sampling(max_tokens=max_tokens, given=given, priority=integer(payload, "priority") or 0)
    gen_request = generation([_prompt(payload)], sampling, limits, cache_scope(payload, limits))
    answer_id = text(payload, "request_id") or f"resp_{stamp.request_id}"
    return gen_request, ResponseReply(gen_request, stamp, wanted, answer_id, limits.block_tokens)


class ResponseReply:
    """One response: a message, or a call of a function."""

    def __init__(
        self, gen_request: GenerationRequest, stamp: Stamp, wanted: Wanted, answer_id: str, block_tokens: int
    ) -> None:
        self.answer_id = answer_id
        self._block_tokens = block_tokens
        mark = xxhash.xxh3_64_hexdigest(self.answer_id.encode())
        self._item_id = f"fc_{mark}" if wanted.call else f"msg_{mark}"
        self._call_id = f"chatcmpl-tool-{mark}"
        self._script = gen_request.choices[0].script
        self._stamp = stamp
        self._wanted = wanted
        self.keep: Callable[[dict[str, Any]], None] | None = None
        """Callback that gets the whole response."""
        self._sequence_number = -1

    def engine_id(self, prompt: int) -> str:
        return f"{self.answer_id}_0"

    def opening(self) -> bytes:
        response = self._response("in_progress", [], None)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def begin(self) -> bytes:
        added = self._event("response.output_item.added", output_index=0, item=self._item("in_progress", None))
        if self._wanted.call is not None:
            return added
        return added + self._on_text("response.content_part.added", part=_part(""))

    def delta(self, choice: int, start: int, count: int) -> bytes:
        piece = self._script.text(start, count)
        if not piece:
            return b""
        if self._wanted.call is not None:
            return self._on_item("response.function_call_arguments.delta", delta=piece)
        return self._on_text("response.output_text.delta", delta=piece, logprobs=[])

    def end(self, choice: int, start: int, ended: Ended) -> bytes:
        said = self._script.text(0, ended.tokens)
        last = self.delta(choice, start, ended.tokens - start)
        if self._wanted.call is not None:
            name = self._wanted.call.tool.name
            done = self._on_item("response.function_call_arguments.done", arguments=said, name=name)
        else:
            done = self._on_text("response.output_text.done", text=said, logprobs=[])
            done += self._on_text("response.content_part.done", part=_part(said))
        item = self._item("completed", said)
        return last + done + self._event("response.output_item.done", output_index=0, item=item)

    def closing(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        return self._event("response.completed", response=self._complete(ends[0], usage))

    def broken(self, error: ApiError) -> bytes:
        return b""  # vLLM's stream breaks off

    def whole(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        return orjson.dumps(self._complete(ends[0], usage))

    def refusal(self, error: ApiError) -> bytes:
        return error.body()

    def _complete(self, ended: Ended, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if ended.finish_reason == "length" else "completed"  # also of one that was aborted
        whole = self._response(status, [self._item("completed", self._script.text(0, ended.tokens))], usage)
        if self.keep is not None:
            self.keep(whole)
        return whole

    def _item(self, status: str, said: str | None) -> dict[str, Any]:
        if self._wanted.call is not None:
            return {
                "type": "function_call",
                "id": self._item_id,
                "call_id": self._call_id,
                "name": self._wanted.call.tool.name,
                "arguments": said or "",
                "status": status,
            }
        content = [] if said is None else [_part(said)]
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        wanted = self._wanted
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._stamp.created,
            "status": status,
            "model": self._stamp.model,
            "output": output,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": wanted.instructions,
            "metadata": wanted.metadata,
            "parallel_tool_calls": True,
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            "tool_choice": wanted.tool_choice,
            "tools": wanted.tools,
            "text": wanted.text,
            "background": False,
            "max_output_tokens": wanted.max_output_tokens,
            "max_tool_calls": None,
            "previous_response_id": wanted.previous_response_id,
            "reasoning": None,
            "service_tier": "auto",
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage, self._block_tokens),
            "user": None,
        }

    def _on_text(self, kind: str, **fields: Any) -> bytes:
        return self._on_item(kind, content_index=0, **fields)

    def _on_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        return named_event({"type": kind, "sequence_number": self._sequence_number, **fields})


def _part(said: str) -> dict[str, Any]:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": None}


def _usage(usage: Usage, block_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.created_tokens(block_tokens),
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _prompt(payload: Body) -> PromptText:
    """The conversation of ``instructions`` and ``input``, as chats are rendered. Raises ApiError."""
    given = required(payload, "input")
    if isinstance(given, list):
        if not given:
            raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
        for index, item in enumerate(given):
            if not isinstance(item, Mapping):
                raise invalid(f"input.{index}", "dict_type", "Input should be a valid dictionary", item)
    elif not isinstance(given, str):
        raise invalid("input", "string_type", "Input should be a valid string or a valid list", given)
    text(payload, "instructions")
    try:
        chat = chat_of_response(payload)
        rendered = render_chat(chat["messages"], chat.get("tools"))
        return without_opening(rendered) if chat.get("continue_final_message") else rendered
    except (PromptError, ValueError) as error:
        raise invalid("input", "value_error", f"Value error, {error}", given) from error


def _read_tool_choice(payload: Body, listed: Sequence[Mapping[str, Any]]) -> ToolCall | None:
    choice = payload.get("tool_choice")
    functions = [
        Tool(str(each["name"]), parameters_of(each, "parameters"), each.get("strict") is True)
        for each in listed
        if each.get("type") == "function" and isinstance(each.get("name"), str)
    ]
    if choice in (None, "auto", "none"):
        return None
    if not functions:
        raise bad_request(f"Tool choice '{choice}' must be specified with 'tools' parameter.", "tool_choice")
    if choice == "required":
        return checked(ToolCall(functions[0], "stop"))
    name = choice.get("name") if isinstance(choice, Mapping) else None
    if not isinstance(name, str):
        raise invalid("tool_choice", "literal_error", "Input should be 'none', 'auto' or 'required'", choice)
    found = named(functions, name)
    if found is None:
        raise bad_request("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")
    return checked(ToolCall(found, "stop"))


def _read_format(options: Body) -> MakeText | None:
    wanted = mapping(options, "format")
    if wanted is None:
        return None
    kind = word(wanted, "type", ("text", "json_object", "json_schema"), "text.format")
    if kind == "json_schema":
        if wanted.get("schema") is None:
            raise missing("text.format.ResponseFormatTextJSONSchemaConfig.schema", wanted)
        return json_text(wanted["schema"])
    return json_text(None) if kind == "json_object" else None
