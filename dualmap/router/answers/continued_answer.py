"""The events of a stream that another instance goes on with, made of those of its own answer.

The client sees one stream: the same id and time, no second role, nothing twice, and the usage of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from dualmap.router.answers.continued_response import ending_response, unseen
from dualmap.router.answers.response_so_far import named_event
from dualmap.router.answers.rest import Rest
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import error_event, event_object, is_error
from dualmap.router.answers.whole_usage import usage_of, whole_usage
from dualmap.router.prompts.inference_request import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH

_ENVELOPE: Final = ("id", "object", "created", "model")
_DONE: Final = b"data: [DONE]\n\n"
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ContinuedAnswer:
    """Makes events of the client's answer from those of another answer, which has the rest.

    Args:
        path: of the client's request.
        so_far: what the client has.
        shows_usage: the client is to get the usage.
        shows_ids: the client is to get the ids of tokens.
        index: of its choice, where it is one of several answers, whose stream has an end and a usage of its own; None:
            the only one.
    """

    def __init__(
        self,
        path: str,
        so_far: AnswerSoFar,
        rest: Rest,
        *,
        overlap: str,
        shows_usage: bool,
        shows_ids: bool,
        index: int | None = None,
    ) -> None:
        self._path = path
        self.from_path = rest.path
        """Path of the API that gives the rest."""
        self._envelope = so_far.envelope
        self.tokens = rest.tokens
        self._overlap = overlap
        """Text that the client has, with which the other answer is yet to begin."""
        self._chars = rest.chars
        self._shows_usage = shows_usage
        self._shows_ids = shows_ids
        self.so_far = self._so_far = so_far
        """The part of the answer that the client has."""
        self._is_one_of_several = index is not None
        self._index = index or 0
        self._shows_role = self._is_one_of_several and not so_far.has_role
        self._block = so_far.block
        """The message's open block."""
        self._call: int | None = None
        """The tool call that the open block is of."""
        self._stop: tuple[str | None, str | None] | None = None
        self._usage: Mapping[str, Any] = {}

    def event(self, event: bytes) -> bytes:
        """The client's event or events for one of the other answer; may be empty.

        Raises:
            UpstreamError: it does not go on where the client's text ends.
        """
        found = event_object(event)
        if found is None:
            return b"" if self._path == MESSAGES_PATH or self._is_one_of_several else event
        if is_error(found):
            return error_in_form_of(self._path, event, found)
        choices, usage = found.get("choices"), self._counted(found.get("usage"))
        self._usage = usage or self._usage
        if self._path == MESSAGES_PATH:
            return self._message_events(choices or ())
        if not choices:
            return b"" if not usage or not self._shows_usage else self._framed({**found, "choices": [], "usage": usage})
        choice = self._choice(choices[0])
        if choice is None:
            return b""
        made = {**found, "choices": [choice]}
        if usage and self._shows_usage:
            made["usage"] = usage
        else:
            made.pop("usage", None)
        return self._framed(made)

    def _framed(self, found: dict[str, Any]) -> bytes:
        """An event of the client's answer: its id, its time and its kind are those that it began with."""
        envelope = self._envelope
        if envelope is not None:
            found |= {name: envelope[name] for name in _ENVELOPE if name in envelope}
        return b"data: %b\n\n" % orjson.dumps(found)

    def _choice(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        """The choice as the client is to see it; None where it has nothing for the client."""
        if self.from_path == CHAT_PATH:
            return self._chat_choice(choice)
        text = self._unseen(choice.get("text") or "")
        if not text and choice.get("finish_reason") is None and not choice.get("logprobs") and not self._shows_ids:
            return None
        ids = choice.get("token_ids") if self._shows_ids else None
        if self._path == CHAT_PATH:
            made: dict[str, Any] = {
                "index": self._index,
                "delta": {"content": text} if text else {},
                "logprobs": None,
                "finish_reason": choice.get("finish_reason"),
            }
            if made["finish_reason"] is not None:
                made["stop_reason"] = choice.get("stop_reason")
            return made | {"token_ids": ids}
        made = {**choice, "index": self._index, "text": text, "token_ids": ids, "prompt_token_ids": None}
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            offsets = [self._chars + offset for offset in logprobs["text_offset"]]
            made["logprobs"] = {**logprobs, "text_offset": offsets}
        return made

    def _chat_choice(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        delta = dict(choice.get("delta") or {})
        if "role" in delta and not self._shows_role:
            del delta["role"]
            if not any(delta.values()) and choice.get("finish_reason") is None:
                return None
        if self._overlap and (text := delta.get("content")):
            delta["content"] = self._unseen(text)
            if not any(delta.values()) and choice.get("finish_reason") is None:
                return None
        made = {**choice, "index": self._index, "delta": delta}
        if not self._shows_ids and "token_ids" in made:
            made["token_ids"] = None
        return made

    def _unseen(self, text: str) -> str:
        """The text without what the client has."""
        if self._overlap and text:
            text, self._overlap = unseen(text, self._overlap)
        return text

    def _counted(self, usage: object) -> dict[str, Any]:
        """A usage of the whole answer."""
        if not isinstance(usage, dict):
            return {}
        return whole_usage(usage, self.tokens, "prompt_tokens", "completion_tokens")

    @property
    def counted(self) -> tuple[int | None, int | None]:
        """The tokens of the prompt and of the whole answer, as the other answer's usage has told them."""
        return self._usage.get("prompt_tokens"), self._usage.get("completion_tokens")

    # messages --------------------------------------------------------------------------------------------------
    def _message_events(self, choices: Sequence[Mapping[str, Any]]) -> bytes:
        made = b""
        for choice in choices:
            delta = choice.get("delta") or {}
            if text := self._unseen(delta.get("content") or ""):
                if self._block is None or self._call is not None:
                    made += self._next({"type": "text", "text": ""}, None)
                made += self._more({"type": "text_delta", "text": text})
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if function.get("name"):
                    use = {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": {}}
                    made += self._next(use, call.get("index", 0))
                if function.get("arguments"):
                    made += self._more({"type": "input_json_delta", "partial_json": function["arguments"]})
            if (reason := choice.get("finish_reason")) is not None:
                stopped_by = choice.get("stop_reason")
                if reason == "stop" and isinstance(stopped_by, str):
                    self._stop = "stop_sequence", stopped_by
                else:
                    self._stop = _STOP_REASONS.get(reason), None
        return made

    def _next(self, block: Mapping[str, Any], call: int | None) -> bytes:
        """Begin another block."""
        stopped = _end_of_block(self._block)
        self._block, self._call = self._so_far.begin_block(), call
        return stopped + named_event({"type": "content_block_start", "content_block": block, "index": self._block})

    def _more(self, delta: Mapping[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "delta": delta, "index": self._block})

    def end(self) -> bytes:
        """The last events, which the other answer has in another form."""
        if self._path != MESSAGES_PATH or self._stop is None:
            return b""
        reason, sequence = self._stop
        details = self._usage.get("prompt_tokens_details")
        cached = (details.get("cached_tokens") or 0) if isinstance(details, dict) else 0
        cached = min(cached, self._usage.get("prompt_tokens") or 0)
        usage = {
            "input_tokens": (self._usage.get("prompt_tokens") or 0) - cached,
            "output_tokens": self._usage.get("completion_tokens") or self._so_far.tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }
        return _end_of_message(self._block, reason, sequence, usage) + named_event({"type": "message_stop"})


def error_in_form_of(path: str, event: bytes, found: Mapping[str, Any]) -> bytes:
    """An error event in the form of the client's API."""
    error = found.get("error")
    if path != MESSAGES_PATH or found.get("type") == "error" or not isinstance(error, dict):
        return event
    kind = error.get("type") or "api_error"
    return error_event({"type": "error", "error": {"type": kind, "message": str(error.get("message"))}})


def _end_of_block(block: int | None) -> bytes:
    return b"" if block is None else named_event({"type": "content_block_stop", "index": block})


def _end_of_message(block: int | None, reason: str | None, sequence: str | None, usage: Mapping[str, Any]) -> bytes:
    """The events that end a message's open block, if any, and say why the message ends."""
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    return _end_of_block(block) + named_event({"type": "message_delta", "delta": delta, "usage": usage})


def ending_events(
    path: str,
    so_far: AnswerSoFar,
    finish_reason: str | None,
    *,
    shows_usage: bool,
    usage: Mapping[str, int] | None = None,
) -> bytes:
    """The last events of an answer of which nothing else is missing.

    Args:
        finish_reason: the one to tell, if any.
        usage: of several answers; None: that of the one that there is, if it is known.
    """
    if path == RESPONSES_PATH:
        return ending_response(so_far, finish_reason)
    if path == MESSAGES_PATH:
        made = b""
        if finish_reason is not None:
            usage = {"output_tokens": so_far.tokens}
            made = _end_of_message(so_far.block, _STOP_REASONS.get(finish_reason), None, usage)
        return made + named_event({"type": "message_stop"})
    made = b"" if finish_reason is None else ending_choice(path, so_far, 0, finish_reason)
    if usage is None and so_far.prompt_tokens is not None and not so_far.others:
        usage = usage_of(so_far.prompt_tokens, so_far.tokens)
    if shows_usage and not so_far.has_usage and usage is not None:
        made += b"data: %b\n\n" % orjson.dumps({**_envelope_of(so_far), "choices": [], "usage": usage})
    return made + _DONE


def ending_choice(path: str, so_far: AnswerSoFar, index: int, finish_reason: str) -> bytes:
    """The event that ends a choice of which nothing else is missing."""
    content: dict[str, Any] = {"text": ""} if path == COMPLETIONS_PATH else {"delta": {}}
    choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    return b"data: %b\n\n" % orjson.dumps({**_envelope_of(so_far), "choices": [choice]})


def _envelope_of(so_far: AnswerSoFar) -> dict[str, Any]:
    return {name: given for name, given in (so_far.envelope or {}).items() if name in _ENVELOPE}


def comment_on(instance_id: str, tokens: int, rests: Iterable[Rest]) -> bytes:
    """The comment event that says where a stream goes on, after how many tokens, and by what."""
    by = "tokens" if all(rest.by_tokens for rest in rests) else "text"
    return f": dualmap: goes on at {instance_id} after {tokens} tokens, by {by}\n\n".encode()
