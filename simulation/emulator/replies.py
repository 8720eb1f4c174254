"""Answers as vLLM formats them: JSON objects, and server-sent events for streams."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from simulation.prompts import WORDS

DONE = b"data: [DONE]\n\n"
_WORD_BYTES = 4
_TEXT_WORDS = 4096
_MARK = "\ue000"
"""Stands for an answer's text while its frame is formatted."""


class AnswerText:
    """An endless text of words of one token each; where an answer starts in it depends on its seed."""

    def __init__(self) -> None:
        # A full-period linear congruential walk over the words; long enough that answers differ.
        state, words = 1, []
        for _ in range(_TEXT_WORDS):
            state = (state * 1_664_525 + 1_013_904_223) % 2**32
            words.append(WORDS[state >> 24])
        self._text = b"".join(words) * 2

    def tokens(self, seed: int, start: int, count: int) -> bytes:
        """Tokens ``start`` to ``start + count`` of the answer with this seed, as ASCII."""
        pieces: list[bytes] = []
        while count > 0:
            offset = (seed + start) % _TEXT_WORDS
            part = min(count, _TEXT_WORDS)
            pieces.append(self._text[offset * _WORD_BYTES : (offset + part) * _WORD_BYTES])
            start += part
            count -= part
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Reply:
    """Formats the answer to one request. Text is ASCII without quotes, so it goes into prepared frames as it is."""

    def __init__(self, *, chat: bool, answer_id: str, model: str, created: int) -> None:
        self.answer_id = answer_id
        self._chat = chat
        self._model = model
        self._created = created
        frame = _event(self._chunk([self._choice(_MARK, None, first=False)]))
        head, _mark, tail = frame.partition(_MARK.encode())
        self._frame = head, tail

    def opening(self) -> bytes:
        """What comes before the first text: a chat stream names the role."""
        return _event(self._chunk([self._choice("", None, first=True)])) if self._chat else b""

    def delta(self, text: bytes) -> bytes:
        """Text in the middle of an answer; the hot path of every stream."""
        head, tail = self._frame
        return head + text + tail

    def closing(self, text: bytes, finish_reason: str, usage: Usage | None) -> bytes:
        """The last text, why it ended, the usage if wanted, and the end of the stream."""
        last = _event(self._chunk([self._choice(text.decode("ascii"), finish_reason, first=False)]))
        if usage is None:
            return last + DONE
        return last + _event({**self._chunk([]), "usage": usage.as_dict()}) + DONE

    def whole(self, text: bytes, finish_reason: str, usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        content = text.decode("ascii")
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": content, "refusal": None, "tool_calls": []}
        else:
            choice["text"] = content
        kind = "chat.completion" if self._chat else "text_completion"
        return orjson.dumps({**self._envelope(kind), "choices": [choice], "usage": usage.as_dict()})

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return {**self._envelope("chat.completion.chunk" if self._chat else "text_completion"), "choices": choices}

    def _envelope(self, kind: str) -> dict[str, object]:
        return {"id": self.answer_id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, text: str, finish_reason: str | None, *, first: bool) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
            choice["stop_reason"] = None
        return choice


def _event(payload: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"
