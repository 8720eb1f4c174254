"""Answers to chats and completions as vLLM formats them: JSON objects, and server-sent events for streams."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from dualmap.simulation.emulator.errors import ApiError
from dualmap.simulation.emulator.generation_request import GenerationRequest
from dualmap.simulation.emulator.logprobs import chat_logprobs, completion_logprobs
from dualmap.simulation.emulator.replies import DONE, Ended, Stamp, Usage, event
from dualmap.simulation.emulator.structured import ToolCall
from dualmap.simulation.workload.tokenizer import encode

_MARK = "\ue000"
"""Placeholder for an answer's text while its frame is formatted."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    """The ids of tokens are wanted (``return_token_ids``), of whole answers as well."""


class OpenAiReply:
    """The common part of replies to chats and completions.

    Args:
        logprobs: alternatives to each token; None: no log-probabilities.
    """

    def __init__(
        self, gen_request: GenerationRequest, stamp: Stamp, options: StreamOptions, logprobs: int | None
    ) -> None:
        self.answer_id = f"{self._id_prefix}-{stamp.request_id}"
        self._gen_request = gen_request
        self._stamp = stamp
        self._options = options
        self._logprobs = logprobs
        self._frame: tuple[bytes, bytes] | None = None
        """The frame around the text of an answer, where only the text changes from chunk to chunk."""
        if len(gen_request.choices) == 1 and logprobs is None and not (options.continuous_usage or options.token_ids):
            head, _mark, tail = event(self._chunk([self._chunk_choice(0, _MARK)])).partition(f'"{_MARK}"'.encode())
            self._frame = head, tail

    _id_prefix = ""
    _kind = ""
    _chunk_kind = ""

    @abstractmethod
    def _chunk_choice(self, choice: int, text: str) -> dict[str, Any]:
        """A choice in the middle of a stream."""

    @abstractmethod
    def _last_choice(self, choice: int, text: str, ended: Ended) -> dict[str, Any]:
        """A choice at its end in a stream."""

    @abstractmethod
    def _whole_choice(self, choice: int, ended: Ended) -> dict[str, Any]:
        """A choice in an answer that does not stream."""

    @abstractmethod
    def _logprobs_of(self, choice: int, start: int, count: int) -> dict[str, Any] | None:
        """The log-probabilities of some tokens, if wanted."""

    @abstractmethod
    def begin(self) -> bytes:
        """The bytes before the first token of all."""

    def opening(self) -> bytes:
        return b""

    def delta(self, choice: int, start: int, count: int) -> bytes:
        text = self._text(choice, start, count)
        if not text and not self._options.token_ids:
            return b""
        if self._frame is not None:
            head, tail = self._frame
            return head + orjson.dumps(text) + tail
        payload = self._chunk_choice(choice, text)
        payload["logprobs"] = self._logprobs_of(choice, start, count)
        self._tell_ids(payload, choice, start, count)
        return event(self._with_usage(self._chunk([payload]), choice, start + count))

    def end(self, choice: int, start: int, ended: Ended) -> bytes:
        count = ended.tokens - start
        payload = self._last_choice(choice, self._text(choice, start, count), ended)
        if count:
            payload["logprobs"] = self._logprobs_of(choice, start, count)
        self._tell_ids(payload, choice, start, count)
        chunk = self._chunk([payload])
        if not self._options.include_usage:
            chunk["system_fingerprint"] = self._stamp.fingerprint
        return event(self._with_usage(chunk, choice, ended.tokens))

    def closing(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        if not self._options.include_usage:
            return DONE
        last = {**self._chunk([]), "usage": _usage(usage), "system_fingerprint": self._stamp.fingerprint}
        return event(last) + DONE

    def broken(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def whole(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        choices = [self._whole_choice(number, ended) for number, ended in enumerate(ends)]
        return orjson.dumps(
            {
                **self._envelope(self._kind),
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": self._stamp.fingerprint,
                "usage": _usage(usage),
                "kv_transfer_params": None if self._gen_request.kv is None else self._gen_request.kv.returned,
            }
        )

    def refusal(self, error: ApiError) -> bytes:
        return error.body()

    def _text(self, choice: int, start: int, count: int) -> str:
        return self._gen_request.choices[choice].script.text(start, count)

    def _tell_ids(self, payload: dict[str, Any], choice: int, start: int, count: int) -> None:
        """Put the ids of some tokens into a choice, if they are wanted."""
        if self._options.token_ids:
            texts = self._gen_request.choices[choice].script.token_texts(start, count)
            payload["token_ids"] = [token for text in texts for token in encode(text.encode())]

    def _prompt_ids(self, choice: int) -> list[int] | None:
        """The ids of a choice's prompt, if they are wanted."""
        return encode(self._gen_request.choices[choice].prompt.text) if self._options.token_ids else None

    def _stop_reason(self, choice: int, ended: Ended) -> str | None:
        return self._gen_request.choices[choice].script.stop_reason if ended.finish_reason == "stop" else None

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self._stamp.created, "model": self._stamp.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope(self._chunk_kind), "choices": choices}

    def _with_usage(self, chunk: dict[str, Any], choice: int, tokens: int) -> dict[str, Any]:
        if self._options.continuous_usage:
            prompt_tokens = self._gen_request.choices[choice].prompt.tokens
            chunk["usage"] = {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + tokens,
                "completion_tokens": tokens,
            }
        return chunk


class ChatReply(OpenAiReply):
    """Answers to a chat: texts, or calls of a tool."""

    _id_prefix = "chatcmpl"
    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        gen_request: GenerationRequest,
        stamp: Stamp,
        options: StreamOptions,
        logprobs: int | None,
        call: ToolCall | None,
    ) -> None:
        self._call = call
        super().__init__(gen_request, stamp, options, logprobs)

    def engine_id(self, prompt: int) -> str:
        return self.answer_id

    def begin(self) -> bytes:
        """A chat's stream names the role, and the function that is called."""
        pieces: list[bytes] = []
        for number in range(len(self._gen_request.choices)):
            delta: dict[str, Any] = {"role": "assistant", "content": ""}
            role = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = {**self._chunk([role]), "prompt_token_ids": self._prompt_ids(number), "prompt_text": None}
            pieces.append(event(self._with_usage(chunk, number, 0)))
        if self._call is not None:
            for number in range(len(self._gen_request.choices)):
                delta = {"content": None, "tool_calls": [{**self._call_head(number, self._call), "index": 0}]}
                pieces.append(event(self._chunk([self._with_delta(number, delta)])))
        return b"".join(pieces)

    def _chunk_choice(self, choice: int, text: str) -> dict[str, Any]:
        if self._call is None:
            return self._with_delta(choice, {"content": text})
        arguments = {"index": 0, "function": {"arguments": text}}
        return self._with_delta(choice, {"content": None, "tool_calls": [arguments]})

    def _last_choice(self, choice: int, text: str, ended: Ended) -> dict[str, Any]:
        last = self._chunk_choice(choice, text) if text else self._with_delta(choice, {})
        last["finish_reason"] = self._finish_reason(ended)
        last["stop_reason"] = self._stop_reason(choice, ended)
        return last

    def _whole_choice(self, choice: int, ended: Ended) -> dict[str, Any]:
        text = self._text(choice, 0, ended.tokens)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if self._call is None else "",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if self._call is not None:
            head = self._call_head(choice, self._call)
            message["tool_calls"] = [{**head, "function": {**head["function"], "arguments": text}}]
        whole = {
            "index": choice,
            "message": message,
            "logprobs": self._logprobs_of(choice, 0, ended.tokens),
            "finish_reason": self._finish_reason(ended),
            "stop_reason": self._stop_reason(choice, ended),
            "token_ids": None,
        }
        self._tell_ids(whole, choice, 0, ended.tokens)
        return whole

    def _logprobs_of(self, choice: int, start: int, count: int) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return chat_logprobs(self._gen_request.choices[choice].script.token_texts(start, count), self._logprobs)

    def _finish_reason(self, ended: Ended) -> str:
        return self._call.finish_reason if self._call and ended.finish_reason == "stop" else ended.finish_reason

    def _call_head(self, choice: int, call: ToolCall) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-tool-{xxhash.xxh3_64_hexdigest(f'{self.answer_id}/{choice}'.encode())}",
            "type": "function",
            "function": {"name": call.tool.name},
        }

    @staticmethod
    def _with_delta(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}


class CompletionReply(OpenAiReply):
    """Answers to a completion.

    Args:
        echoes: what comes before each answer: the tokens of its prompt, or none.
    """

    _id_prefix = "cmpl"
    _kind = "text_completion"
    _chunk_kind = "text_completion"

    def __init__(
        self,
        gen_request: GenerationRequest,
        stamp: Stamp,
        options: StreamOptions,
        logprobs: int | None,
        echoes: Sequence[Sequence[str]],
    ) -> None:
        self._echoes = echoes
        super().__init__(gen_request, stamp, options, logprobs)

    def engine_id(self, prompt: int) -> str:
        return f"{self.answer_id}-{prompt}"

    def begin(self) -> bytes:
        return b""

    def _text(self, choice: int, start: int, count: int) -> str:
        echo = "" if start else "".join(self._echoes[choice])
        return echo + super()._text(choice, start, count)

    def _chunk_choice(self, choice: int, text: str) -> dict[str, Any]:
        return {
            "index": choice,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }

    def _tell_ids(self, payload: dict[str, Any], choice: int, start: int, count: int) -> None:
        super()._tell_ids(payload, choice, start, count)
        if start == 0:
            payload["prompt_token_ids"] = self._prompt_ids(choice)

    def _last_choice(self, choice: int, text: str, ended: Ended) -> dict[str, Any]:
        reasons = {"finish_reason": ended.finish_reason, "stop_reason": self._stop_reason(choice, ended)}
        return {**self._chunk_choice(choice, text), **reasons}

    def _whole_choice(self, choice: int, ended: Ended) -> dict[str, Any]:
        last = self._last_choice(choice, self._text(choice, 0, ended.tokens), ended)
        self._tell_ids(last, choice, 0, ended.tokens)
        return {**last, "logprobs": self._logprobs_of(choice, 0, ended.tokens), "prompt_logprobs": None}

    def _logprobs_of(self, choice: int, start: int, count: int) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        script, echo = self._gen_request.choices[choice].script, self._echoes[choice]
        tokens = [] if script.visible_chars == 0 else script.token_texts(start, count)
        if start == 0:
            return completion_logprobs([*echo, *tokens], self._logprobs, 0, has_start=bool(echo))
        said = sum(map(len, echo)) + len(script.text(0, start))
        return completion_logprobs(tokens, self._logprobs, said, has_start=False)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
