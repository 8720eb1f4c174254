"""The part of a streamed answer that its client has: its text, its tokens, and why another instance cannot go
on with it.

It is read from the events of the stream as they came, long after they have passed, and only of a stream that fails.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from dualmap.router.answers.response_so_far import BEGINNINGS, ENDS, ResponseSoFar
from dualmap.router.answers.sse import EVENT_END, event_object
from dualmap.router.prompts.inference_request import MESSAGES_PATH, RESPONSES_PATH

_REASONING: Final = ("reasoning", "reasoning_content")
_PLAIN: Final = frozenset({"role", "content", *_REASONING})
_MARKS: Final = 128
"""Places between tokens that are kept, of the last ones."""
_PROMPT_IDS: Final = re.compile(rb'"prompt_token_ids"\s*:\s*\[([0-9,\s]+)\]')


class AnswerSoFar:
    """One answer to one prompt, or the first of several. Of what is no such answer, ``unfit`` says why it cannot be
    continued."""

    def __init__(self, answers: int = 1, prompts: int = 1) -> None:
        """``answers``: how many answers the stream has, as many to each of the ``prompts``."""
        self.others = [AnswerSoFar() for _ in range(1, answers)]
        """The other answers, in the order of their choices."""
        self._prompts = prompts
        self.envelope: Mapping[str, Any] | None = None
        """The first event that has a choice; of a message, the one that begins it; of a response, itself, as it began.
        """
        self.texts: list[str] = []
        self.chars = 0
        self.token_ids = array("q")
        self.has_ids = True
        """Every event with text had the ids of its tokens."""
        self.prompt_ids: bytes | None = None
        """The prompt's token ids as JSON, without brackets."""
        self.marks: deque[tuple[int, int, bool]] = deque([(0, 0, True)], _MARKS)
        """The numbers of tokens and characters behind each of the last events that had text; and whether the tokens
        stand for just these characters. Else an engine that looks for stop strings may have held some back."""
        self._repeated = ""
        """Text that the client has, and that comes again."""
        self.client_chars = 0
        """Characters that the client has, if those are more."""
        self.events = 0
        """Events with text, or reasoning."""
        self.before = 0
        """Tokens of the answer with which the prompt ended that gave its last part: the counts there differ by them."""
        self.counted: int | None = None
        """Tokens as an event with a usage has counted them last."""
        self.counted_prompt: int | None = None
        self.finished = False
        """A finish reason has come."""
        self.has_usage = False
        """The event with the usage alone has come."""
        self.reasoned = False
        self.has_role = False
        """The role of a chat's answer has come."""
        self.block: int | None = None
        """The index of a message's open block."""
        self._blocks = 0
        """Blocks of a message that have begun."""
        self.response: ResponseSoFar | None = None
        """The items of a response."""
        self.unfit = ""

    @property
    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    @property
    def tokens(self) -> int:
        """Tokens of the answer: by their ids, as the engine counted them, or one for each event."""
        if self.has_ids and self.token_ids:
            return len(self.token_ids)
        return self.events if self.counted is None else self.counted

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, where they are known."""
        return self.counted_prompt if self.prompt_ids is None else 1 + self.prompt_ids.count(b",")

    def answers(self) -> list[AnswerSoFar]:
        """All answers of the stream. Those to one prompt know its tokens as soon as one of them does."""
        answers = [self, *self.others]
        for group in self._by_prompt():
            known = next((answer.prompt_ids for answer in group if answer.prompt_ids is not None), None)
            for answer in group:
                answer.prompt_ids = answer.prompt_ids or known
                answer.envelope = answer.envelope or self.envelope
        return answers

    def tokens_of_prompts(self) -> int | None:
        """Tokens of all prompts, each counted once; None where those of one are not known."""
        counts = [
            next((answer.prompt_tokens for answer in group if answer.prompt_tokens is not None), None)
            for group in self._by_prompt()
        ]
        return None if None in counts else sum(count for count in counts if count is not None)

    def _by_prompt(self) -> list[list[AnswerSoFar]]:
        answers = [self, *self.others]
        each = max(1, len(answers) // self._prompts)
        return [answers[at : at + each] for at in range(0, len(answers), each)]

    def end(self, prompt_tokens: int | None, tokens: int | None) -> None:
        """The rest is over. ``tokens`` is the length of the whole answer, if known."""
        self.finished, self.has_ids, self.counted = True, False, tokens
        if self.counted_prompt is None:
            self.counted_prompt = prompt_tokens

    def begin_block(self) -> int:
        """The index of a new block of a message, which is open from now on."""
        self.block = self._blocks
        self._blocks += 1
        return self.block

    def read(self, path: str, events: bytes) -> None:
        """Take in the next events, which are whole, of a stream of this path's API."""
        read: Callable[[AnswerSoFar, Mapping[str, Any]], None] = _READERS.get(path, AnswerSoFar._read_choices)
        for event in EVENT_END.split(events):
            found = event_object(event)
            if found is not None:
                read(self, found)

    def cut(self, tokens: int, chars: int) -> str:
        """Forget what is behind so many tokens and characters: it comes again. Returns the text that the client has of
        that."""
        del self.token_ids[tokens:]
        text = self.text
        self.client_chars = max(self.client_chars, self.chars)
        self.texts, self.chars = [text[:chars]], chars
        self.marks = deque([(tokens, chars, True)], _MARKS)
        self.counted, self.before = None, tokens
        return text[chars:]

    def count_by(self, path: str, events: bytes) -> None:
        """Take the number of tokens from the events of the end, unless they have text, which the client has not."""
        if self.others:
            return
        end = AnswerSoFar()
        end.read(path, events)
        if not end.chars and end.counted is not None:
            self.counted = self.before + end.counted

    def by_text(self, tokens: int, repeated: str = "") -> None:
        """Its rest is the answer to its text, which has so many tokens: their ids are not known any more. ``repeated``:
        the end of the text, with which the rest begins as it comes from the instance."""
        self.counted, self.has_ids, self.events, self.before = None, False, tokens, tokens
        self._repeated = repeated

    def _read_choices(self, found: Mapping[str, Any]) -> None:
        choices, usage = found.get("choices"), found.get("usage")
        if isinstance(usage, dict):
            if not self.others:
                self._count(usage.get("prompt_tokens"), usage.get("completion_tokens"))
            self.has_usage = self.has_usage or choices == []
        for choice in choices or ():
            index = choice.get("index") or 0
            if index > len(self.others):
                self.unfit = "it has several choices"
                return
            answer = self.others[index - 1] if index else self
            answer._read_choice(found, choice)

    def _read_choice(self, found: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        if self.envelope is None:
            self.envelope = found
        prompt_ids = choice.get("prompt_token_ids") or found.get("prompt_token_ids")
        if self.prompt_ids is None and isinstance(prompt_ids, list):
            self.prompt_ids = orjson.dumps(prompt_ids)[1:-1]
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.token_ids.extend(ids)
        delta = choice.get("delta")
        if delta is None:
            self._add(choice.get("text"), has_ids=isinstance(ids, list))
        else:
            self._read_delta(delta, has_ids=isinstance(ids, list))
        self.finished = self.finished or choice.get("finish_reason") is not None

    def _read_delta(self, delta: Mapping[str, Any], *, has_ids: bool) -> None:
        if any(filled and name not in _PLAIN for name, filled in delta.items()):
            self.unfit = "it has called a tool" if delta.get("tool_calls") else "it is not of text alone"
        self.has_role = self.has_role or "role" in delta
        if any(delta.get(name) for name in _REASONING):
            self.reasoned = True
            self.events += 1
        self._add(delta.get("content"), has_ids=has_ids)

    def _read_message(self, found: Mapping[str, Any]) -> None:
        match found.get("type"):
            case "message_start":
                self.envelope = found
                usage = found["message"].get("usage") or {}
                self._count(usage.get("input_tokens"), None)
            case "content_block_start":
                self.begin_block()
                kind = found["content_block"].get("type")
                if kind == "thinking":
                    self.reasoned = True
                elif kind != "text":
                    self.unfit = "it has called a tool"
            case "content_block_stop":
                self.block = None
            case "content_block_delta":
                delta = found["delta"]
                if delta.get("type") == "text_delta":
                    self._add(delta.get("text"), has_ids=False)
            case "message_delta":
                self.finished = self.has_usage = True

    def _read_response(self, found: Mapping[str, Any]) -> None:
        if self.response is None or not self.response.is_continued:
            self.take_response_event(found)

    def take_response_event(self, found: Mapping[str, Any]) -> None:
        """Take in an event of a response, as its client has got it."""
        if self.response is None:
            self.response = ResponseSoFar()
        response = self.response
        response.count(found)
        match found.get("type"):
            case kind if kind in BEGINNINGS:
                self.envelope = self.envelope or found.get("response")
            case "response.output_item.added":
                item = found.get("item") or {}
                if item.get("type") == "message":
                    response.begin_message(found, self.chars)
                elif item.get("type") == "reasoning":
                    self.reasoned = True
                else:
                    self.unfit = "it has called a tool"
            case "response.content_part.added":
                kind = (found.get("part") or {}).get("type")
                response.has_part = kind == "output_text"
                if kind not in ("output_text", "reasoning_text"):
                    self.unfit = "it is not of text alone"
            case "response.output_text.delta":
                self._add(found.get("delta"), has_ids=False)
            case "response.output_item.done":
                response.end_item(found)
            case kind if kind in ENDS:
                self.finished = self.has_usage = True

    def _count(self, prompt_tokens: object, tokens: object) -> None:
        if isinstance(prompt_tokens, int):
            self.counted_prompt = max(0, prompt_tokens - self.before)
        if isinstance(tokens, int) and tokens:
            self.counted = self.before + tokens

    def _add(self, text: object, *, has_ids: bool) -> None:
        if not isinstance(text, str) or not text:
            return
        self.events += 1
        if self._repeated:
            again = len(text)
            text, self._repeated = text[len(self._repeated) :], self._repeated[again:]
            if not text:
                return
        self.texts.append(text)
        self.chars += len(text)
        self.has_ids = self.has_ids and has_ids
        self.marks.append((len(self.token_ids), self.chars, False))


_READERS: Final[Mapping[str, Callable[[AnswerSoFar, Mapping[str, Any]], None]]] = {
    MESSAGES_PATH: AnswerSoFar._read_message,
    RESPONSES_PATH: AnswerSoFar._read_response,
}


def prompt_ids_in(event: bytes) -> tuple[int, int] | None:
    """The place in an event of the ids of the prompt's tokens, as JSON, between the brackets; None: it has none."""
    found = _PROMPT_IDS.search(event)
    return None if found is None else found.span(1)


def read_ids(listed: bytes) -> list[int]:
    """Token ids from such a list."""
    ids: list[int] = orjson.loads(b"[%b]" % listed)
    return ids
