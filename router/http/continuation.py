"""A stream whose instance could not finish it goes on with the answer of another one.

One that failed when the client had only comments of it goes on from its begin. One that its decoder gave back in the
middle goes on from where it stopped.

vLLM-Ascend's decoders end such a stream with ``stop_reason: "recomputed"``. The request is then sent again with the
text so far behind its prompt, that much less to answer, and all its other fields as they are. The client sees one
stream: no second role, and the usage of the whole. Answers of which the text so far is not everything (tool calls,
reasoning, a grammar, log probabilities, a prompt of token ids) is not continued. Of an answer that is continued, what
looks back at its tokens alone begins again: penalties for presence and frequency, and the draws from a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from dualmap.api_bodies.json_body import read_json, write_json
from dualmap.api_bodies.lax_values import lax_int
from dualmap.router.errors import RouterError, error_body
from dualmap.router.http.admission import may_split
from dualmap.router.http.downstream import ByteSource, Downstream
from dualmap.router.http.heads import Header, as_chunk
from dualmap.router.http.sse import EVENT_END, EventEditor, error_event, event_object
from dualmap.scheduling.request.outcome import Usage
from dualmap.scheduling.values import value

_CHAT: Final = "/v1/chat/completions"
_NOT_CONTINUED: Final = frozenset(
    {
        *("tools", "tool_choice", "functions", "structured_outputs", "logprobs", "top_logprobs", "return_token_ids"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
        "truncate_prompt_tokens",  # the text so far would take the place of the prompt's begin
    }
)
_LEFT: Final = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}
"""Least remainder of the fields that count an answer's tokens."""
_COMPLETION_TOKENS: Final = 16
"""``max_tokens`` of a completion that does not say."""
_HEAD_END: Final = b"\r\n\r\n"
_MAX_HELD_BYTES: Final = 1 << 20
"""Most bytes that are held of an incomplete event; a longer one passes as it is."""


@value
class Continued:
    """The request that continues a stream."""

    body: bytes
    tokens: int
    """Tokens of the answer, with which the new prompt ends."""


def continued(path: str, body: bytes, events: bytes, unsent: bytes = b"") -> Continued | None:
    """The next request for an answer that stopped after these ``events``; None where it cannot be continued.
    ``unsent``: the events that gave it back."""
    request = read_json(body)
    found, end = _text_of(path, events), _text_of(path, unsent)
    if found is None or not _may_continue(path, request):
        return None
    text, tokens = found
    if end is not None and not end[0]:  # so its usage counts what the client has
        tokens = end[1] or tokens
    if text and path == _CHAT:
        _continue_message(request, text)
    elif text:
        request["prompt"] += text
    if path != _CHAT:
        request.setdefault("max_tokens", _COMPLETION_TOKENS)
    for name, least in _LEFT.items():
        if limit := lax_int(request.get(name)):
            request[name] = max(least, limit - tokens)
    return Continued(write_json(request), tokens)


def _may_continue(path: str, request: Mapping[str, Any]) -> bool:
    """Whether its text is all that an answer to it depends on, and it is one answer to one prompt."""
    chosen = [request.get(name) for name in _NOT_CONTINUED]
    if not all(each is None or each is False or each == [] for each in chosen) or not may_split(path, request):
        return False
    if request.get("include_reasoning") is False:  # so no event shows whether there was any
        return False
    if request.get("stop") and request.get("include_stop_str_in_output"):  # a part of one may have been sent
        return False
    wanted = request.get("response_format") or {"type": "text"}
    if not isinstance(wanted, dict) or wanted.get("type") != "text":
        return False
    if path != _CHAT:
        return isinstance(request.get("prompt"), str)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        return False
    return not request.get("continue_final_message") or isinstance(messages[-1].get("content"), str)


def _continue_message(request: dict[str, Any], text: str) -> None:
    messages = request["messages"]
    last = messages[-1]
    if request.get("continue_final_message"):
        request["messages"] = [*messages[:-1], {**last, "content": last["content"] + text}]
        return
    request["messages"] = [*messages, {"role": "assistant", "content": text}]
    request |= {"add_generation_prompt": False, "continue_final_message": True}


def _text_of(path: str, events: bytes) -> tuple[str, int] | None:
    """The text of a stream's events, and how many tokens it has: those it counts itself, else one an event. None where
    an answer is not of text alone."""
    texts, tokens = [], 0
    for event in EVENT_END.split(events):
        found = event_object(event)
        for choice in (found or {}).get("choices") or ():
            delta = choice.get("delta") or {} if path == _CHAT else {"content": choice.get("text")}
            if any(filled for name, filled in delta.items() if name not in ("role", "content")):
                return None
            if delta.get("content"):
                texts.append(delta["content"])
                tokens += 1
        usage = (found or {}).get("usage")
        if usage:
            tokens = usage.get("completion_tokens") or tokens
    return "".join(texts), tokens


class Continuation:
    """The ``Downstream`` of an answer that goes on in the stream of another one."""

    http_10 = True
    """HTTP/1.0 is claimed, so that bodies come without chunks."""
    bodiless = False

    def __init__(self, client: Downstream, tokens: int, *, begun: bool = True) -> None:
        """``tokens``: of the answer so far. ``begun``: the client has a part of the answer."""
        before = client if isinstance(client, Continuation) else None
        self._client: Downstream = client if before is None else before._client
        self._tokens: int = tokens if before is None else tokens + before._tokens
        self._editor = EventEditor(self._seen_as_one, _MAX_HELD_BYTES)
        self._begun: bool = begun or (before is not None and before._begun)
        self.committed = False
        self.path = client.path
        self.page_fields: Sequence[Header] = ()
        self.received_s = client.received_s

    def count(self, usage: Usage) -> Usage:
        """The usage of the whole answer, from that of its last part."""
        prompt_tokens, output_tokens = usage.prompt_tokens, usage.output_tokens
        return replace(
            usage,
            prompt_tokens=None if prompt_tokens is None else prompt_tokens - self._tokens,
            output_tokens=None if output_tokens is None else output_tokens + self._tokens,
        )

    @property
    def gone(self) -> bool:
        return self._client.gone

    @gone.setter
    def gone(self, gone: bool) -> None:
        self._client.gone = gone

    def keeps_alive(self) -> bool:
        return True

    def write_head(self, head: bytes) -> None:
        """The client has one; what it announces comes as events. An error becomes the last of them."""
        self.committed = True
        fields, _, body = head.partition(_HEAD_END)
        if int(fields.split(b" ", 2)[1]) < 400:
            self.write(body)
        else:
            self._client.break_off(self._framed(b"data: %b\n\n" % body.replace(b"\n", b"")))

    def write(self, data: bytes) -> None:
        """Pass complete events on."""
        self._send(self._editor.feed(data) if self._begun else data)

    def _seen_as_one(self, event: bytes) -> bytes:
        """An event as it would be had the stream not stopped; empty where it would not be."""
        found = event_object(event)
        if found is None:
            return event
        choices, usage = found.get("choices"), found.get("usage")
        if choices and not usage:
            delta, finish = choices[0].get("delta"), choices[0].get("finish_reason")
            if delta and "role" in delta and not delta.get("content") and finish is None:
                return b""
        if not usage:
            return event
        counted = {**usage}
        for name, tokens in (("prompt_tokens", -self._tokens), ("completion_tokens", self._tokens)):
            if isinstance(counted.get(name), int):
                counted[name] += tokens
        return b"data: %b\n\n" % orjson.dumps({**found, "usage": counted})

    def end(self) -> None:
        """The answer is whole."""
        self._send(self._editor.end())
        if not self._client.http_10:
            self._client.write(b"0\r\n\r\n")

    def refuse(self, error: RouterError, fields: Iterable[Header] = ()) -> None:
        """The stream cannot go on."""
        self._client.break_off(self._framed(error_event(error_body(error, self.path))))

    def break_off(self, last_words: bytes) -> None:
        self._client.break_off(self._framed(last_words))

    def abort(self) -> None:
        self._client.abort()

    def set_source(self, source: ByteSource | None) -> None:
        self._client.set_source(source)

    def close_after(self) -> None:
        self._client.close_after()

    def _send(self, data: bytes) -> None:
        if data:
            self._client.write(self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        return data if self._client.http_10 or not data else as_chunk(data)
