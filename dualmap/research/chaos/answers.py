"""Answers of the four APIs in one form, so that a streamed one, a whole one and the expected one can be compared.

Reading is strict: what a client of the API would stumble over is an error. Events of a stream must have one id, one
model and one time, name each role once, end each choice once and close with the API's own end, with nothing after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class Api(StrEnum):
    """The paths that a fleet is asked by."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"


class MalformedError(Exception):
    """An answer that a client of its API could not read, or that contradicts itself; says how."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer, or what has come of it."""

    text: str = ""
    arguments: str = ""
    """Arguments of the one call of a tool."""
    tool: str | None = None
    tokens: list[str] = field(default_factory=list)
    """Tokens with log-probabilities, where they were asked for."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """The stop string that ended it."""

    def begins(self, whole: Choice) -> bool:
        """Whether this could be the beginning of the other one."""
        return (
            whole.text.startswith(self.text)
            and whole.arguments.startswith(self.arguments)
            and self.tool in (None, whole.tool)
            and whole.tokens[: len(self.tokens)] == self.tokens
        )


@dataclass(slots=True)
class Answer:
    """An answer, or what has come of it."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int | None = None
    """None: it says nothing of its usage."""
    completion_tokens: int | None = None
    error: str | None = None
    """The error event that ended its stream, or that the engine aborted it."""
    complete: bool = False
    """The answer has the end that its API demands."""

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


def read_whole(api: Api, body: bytes) -> Answer:
    """An answer that was not streamed. Raises MalformedError."""
    answer = Answer(complete=True)
    said = _object(body)
    match api:
        case Api.CHAT | Api.COMPLETIONS:
            for each in said["choices"]:
                _take_openai(answer, api, each, each.get("message", {}), whole=True)
            _take_usage(answer, said["usage"], "prompt_tokens", "completion_tokens")
        case Api.MESSAGES:
            choice = answer.choice(0)
            for block in said["content"]:
                _take_block(choice, block)
                if block["type"] == "tool_use":
                    choice.arguments = json.dumps(block["input"])
            choice.finish_reason, choice.stop_reason = said.get("stop_reason"), said.get("stop_sequence")
            _take_anthropic_usage(answer, said["usage"])
        case Api.RESPONSES:
            _take_response(answer, said)
    _note_abort(answer, api)
    return answer


class StreamReader:
    """Reads a stream; ``answer`` is what has come so far."""

    def __init__(self, api: Api) -> None:
        self.answer = Answer()
        self._api = api
        self._may_fail = api is Api.RESPONSES
        """An event that says that the response has failed may come behind its error, once."""
        self._stamp: tuple[object, ...] | None = None
        self._roles: set[int] = set()
        self._next_number = 0
        """The number of the next event of a response."""
        self._blocks, self._in_block = 0, False
        """Blocks of a message that have begun, and whether the last one is open."""

    def read(self, body: bytes, *, ended: bool) -> Answer:
        """The answer in the bytes of a stream, which came to its end or not. Raises MalformedError."""
        pieces = body.split(b"\n\n")
        if pieces[-1].strip() and ended and self.answer.error is None:
            raise MalformedError(f"the stream ends within an event: {pieces[-1][-80:]!r}")
        for piece in pieces[:-1]:
            for data in _data_of(piece):
                self._take(data)
        if self.answer.complete:
            _note_abort(self.answer, self._api)
        return self.answer

    def _take(self, data: bytes) -> None:
        answer = self.answer
        if answer.complete:
            raise MalformedError(f"something follows the end: {data[:80]!r}")
        if data == b"[DONE]":
            if self._api in (Api.CHAT, Api.COMPLETIONS):
                answer.complete = True
                return
            raise MalformedError("[DONE] is not of this API")
        said = _object(data)
        if error := said.get("error"):
            answer.error = str(error.get("message", error) if isinstance(error, Mapping) else error)
        elif answer.error is not None and self._may_fail and said.get("type") == "response.failed":
            self._may_fail = False  # the last event of a response says so once more
        elif answer.error is not None:
            raise MalformedError(f"something follows the error: {data[:80]!r}")
        elif self._api in (Api.CHAT, Api.COMPLETIONS):
            self._take_chunk(said)
        elif self._api is Api.MESSAGES:
            self._take_message_event(said)
        else:
            self._take_response_event(said)

    def _take_chunk(self, said: Mapping[str, Any]) -> None:
        self._check_stamp(said["id"], said["object"], said["created"], said["model"])
        for each in said["choices"]:
            delta = each.get("delta", {})
            if self._api is Api.CHAT and not self._roles.issuperset([each["index"]]) and "role" not in delta:
                raise MalformedError(f"choice {each['index']} begins without a role")
            if "role" in delta:
                if each["index"] in self._roles:
                    raise MalformedError(f"choice {each['index']} has its role twice")
                self._roles.add(each["index"])
            _take_openai(self.answer, self._api, each, delta, whole=False)
        if said.get("usage") is not None:
            _take_usage(self.answer, said["usage"], "prompt_tokens", "completion_tokens")

    def _take_message_event(self, said: Mapping[str, Any]) -> None:
        answer, kind = self.answer, said["type"]
        choice = answer.choice(0)
        if kind == "message_start":
            self._check_stamp(said["message"]["id"], said["message"]["model"])
            if 0 in self._roles:
                raise MalformedError("the message starts twice")
            self._roles.add(0)
        elif 0 not in self._roles:
            raise MalformedError(f"{kind} comes before the message starts")
        elif kind == "content_block_start":
            if said["index"] != self._blocks or self._in_block:
                raise MalformedError(f"block {said['index']} begins behind {self._blocks} others")
            self._blocks, self._in_block = self._blocks + 1, True
            _take_block(choice, said["content_block"])
        elif kind == "content_block_stop":
            if not self._in_block or said["index"] != self._blocks - 1:
                raise MalformedError(f"block {said['index']} ends, and is not open")
            self._in_block = False
        elif kind == "content_block_delta":
            if not self._in_block or said["index"] != self._blocks - 1:
                raise MalformedError(f"a piece comes of block {said['index']}, which is not open")
            choice.text += said["delta"].get("text", "")
            choice.arguments += said["delta"].get("partial_json", "")
        elif kind == "message_delta":
            if choice.finish_reason is not None:
                raise MalformedError("the message ends twice")
            choice.finish_reason = said["delta"].get("stop_reason")
            choice.stop_reason = said["delta"].get("stop_sequence")
            _take_anthropic_usage(answer, said["usage"])
        elif kind == "message_stop":
            answer.complete = True

    def _take_response_event(self, said: Mapping[str, Any]) -> None:
        kind = said["type"]
        if "sequence_number" in said:
            if said["sequence_number"] != self._next_number:
                raise MalformedError(f"event {said['sequence_number']} comes instead of event {self._next_number}")
            self._next_number += 1
        if kind in ("response.created", "response.in_progress", "response.completed", "response.incomplete"):
            self._check_stamp(said["response"]["id"], said["response"]["model"], said["response"]["created_at"])
        if kind == "response.output_text.delta":
            self.answer.choice(0).text += said["delta"]
        elif kind == "response.output_text.done" and said["text"] != self.answer.choice(0).text:
            raise MalformedError("the text at the end of the item is not what was streamed")
        elif kind in ("response.completed", "response.incomplete"):
            streamed = self.answer.choice(0).text
            self.answer.choices.clear()
            _take_response(self.answer, said["response"])
            if self.answer.choice(0).text != streamed:
                raise MalformedError("the text of the response is not what was streamed")
            self.answer.complete = True
        elif kind in ("response.failed", "error"):
            self.answer.error = json.dumps(said)[:200]

    def _check_stamp(self, *stamp: object) -> None:
        if self._stamp is None:
            self._stamp = stamp
        elif self._stamp != stamp:
            raise MalformedError(f"the stream changed from {self._stamp} to {stamp}")


_INCOMPLETE: Final = {"incomplete": "length", "completed": "stop", "cancelled": "abort"}


def _note_abort(answer: Answer, api: Api) -> None:
    """An engine that shuts down ends its answers where they stand. Messages have no word for that but null."""
    word = None if api is Api.MESSAGES else "abort"
    if answer.error is None and any(choice.finish_reason == word for choice in answer.choices.values()):
        answer.error = "the engine aborted it"


def _take_openai(answer: Answer, api: Api, each: Mapping[str, Any], content: Mapping[str, Any], *, whole: bool) -> None:
    choice = answer.choice(each["index"])
    text = (content.get("content") if api is Api.CHAT else each.get("text")) or ""
    calls = content.get("tool_calls") or ()
    if choice.finish_reason is not None and (text or calls or each.get("finish_reason")):
        raise MalformedError(f"choice {each['index']} goes on after its end")
    choice.text += text
    for call in calls:
        function = call["function"]
        if "name" in function:
            if choice.tool is not None:
                raise MalformedError(f"choice {each['index']} names its tool twice")
            choice.tool = function["name"]
        choice.arguments += function.get("arguments", "")
    if said := each.get("logprobs"):
        choice.tokens += said["tokens"] if "tokens" in said else [entry["token"] for entry in said["content"]]
    if each.get("finish_reason") is not None:
        choice.finish_reason, choice.stop_reason = each["finish_reason"], each.get("stop_reason")
    elif whole:
        raise MalformedError(f"choice {each['index']} has no finish_reason")


def _take_block(choice: Choice, block: Mapping[str, Any]) -> None:
    choice.text += block.get("text", "")
    if block["type"] == "tool_use":
        if choice.tool is not None:
            raise MalformedError("the message names its tool twice")
        choice.tool = block["name"]


def _take_response(answer: Answer, said: Mapping[str, Any]) -> None:
    choice = answer.choice(0)
    for item in said["output"]:
        choice.text += "".join(part["text"] for part in item.get("content", ()))
    choice.finish_reason = _INCOMPLETE.get(said["status"], said["status"])
    if said["usage"] is not None:  # null: the prompt of a stream that lacked its last events was not counted
        _take_usage(answer, said["usage"], "input_tokens", "output_tokens")


def _take_usage(answer: Answer, usage: Mapping[str, Any], prompt: str, completion: str) -> None:
    answer.prompt_tokens, answer.completion_tokens = usage[prompt], usage[completion]
    if usage["total_tokens"] != usage[prompt] + usage[completion]:
        raise MalformedError(f"the usage does not add up: {usage}")


def _take_anthropic_usage(answer: Answer, usage: Mapping[str, Any]) -> None:
    cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    answer.prompt_tokens, answer.completion_tokens = usage["input_tokens"] + cached, usage["output_tokens"]


def _object(data: bytes) -> dict[str, Any]:
    try:
        said = json.loads(data)
    except ValueError as error:
        raise MalformedError(f"no JSON: {data[:80]!r}") from error
    if not isinstance(said, dict):
        raise MalformedError(f"no JSON object: {data[:80]!r}")
    return said


def _data_of(event: bytes) -> Iterator[bytes]:
    """The data of an event; none for a comment."""
    for line in event.splitlines():
        if line.startswith(b"data: "):
            yield line[6:]
        elif not line.startswith((b"event: ", b":")) and line:
            raise MalformedError(f"no line of an event: {line[:80]!r}")
