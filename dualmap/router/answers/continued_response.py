"""A response (``/v1/responses``) that goes on with the events of another response, which has the rest.

The rest is asked for with the text so far as a last message that is not complete, so its first item is the rest of the
client's open message: that goes on under its own id, and ends with its whole text. What comes behind it are further
items. Numbers, indices, ids and the usage are those of the response that the client reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dualmap.router.answers.response_so_far import BEGINNINGS, ENDS, ResponseSoFar, named_event, text_part
from dualmap.router.answers.rest import Rest
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import event_object, is_error
from dualmap.router.answers.whole_usage import whole_usage
from dualmap.router.errors import UpstreamError

_ENVELOPE: Final = ("id", "created_at", "model", "max_output_tokens")
_ADDED: Final = "response.output_item.added"


class ContinuedResponse:
    """Makes events of the client's response from those of another response, which has the rest."""

    def __init__(self, so_far: AnswerSoFar, rest: Rest, *, overlap: str = "") -> None:
        """``so_far``: what the client has; it grows with what the client gets. ``overlap``: text that the client has,
        with which the other response begins."""
        self._overlap = overlap
        self.from_path = rest.path
        """Path of the API that gives the rest."""
        self.tokens = rest.tokens
        """Tokens of the answer that the client had."""
        self.so_far = self._so_far = so_far
        """The part of the response that the client has."""
        if so_far.response is None:
            so_far.response = ResponseSoFar()
        self._state = state = so_far.response
        state.is_continued = True
        self._awaits_rest = state.message is not None
        """The open message's rest may come as the first item."""
        self._shift = len(state.items) if state.message is None else state.output_index
        """The difference between the client's indices of items and those of the other response."""
        self._same_id: object = None
        """The id in the other response of the message that goes on."""

    def event(self, event: bytes) -> bytes:
        """The client's event or events for one of the other response; may be empty.

        Raises:
            UpstreamError: it does not go on where the client's text ends.
        """
        found = event_object(event)
        kind = None if found is None else found.get("type")
        if found is None or not isinstance(kind, str) or "error" in found or is_error(found):
            return event
        if kind in BEGINNINGS:
            return b""
        made = b""
        if self._awaits_rest and (kind == _ADDED or kind in ENDS):
            self._awaits_rest = False
            item = found.get("item") or {}
            if item.get("type") == "message":
                self._same_id = item.get("id")
                return b""
            if item.get("type") == "reasoning":
                raise UpstreamError("the stream broke off: another instance takes the rest of its text for reasoning")
            made = self._end_message()
            self._shift += 1
        if kind == "response.content_part.added" and self._is_same(found) and self._state.has_part:
            return made
        if self._overlap and kind == "response.output_text.delta" and self._is_same(found):
            text, self._overlap = unseen(str(found.get("delta") or ""), self._overlap)
            if not text:
                return made
            found = {**found, "delta": text}
        return made + self._passed(self._of_client(kind, found))

    def end(self) -> bytes:
        """The last events, which the other response has in another form: none."""
        return b""

    def _passed(self, event: Mapping[str, Any]) -> bytes:
        numbered = self._state.numbered(event)
        self._so_far.take_response_event(numbered)
        return named_event(numbered)

    def _is_same(self, event: Mapping[str, Any]) -> bool:
        """Whether the event is of the message that goes on."""
        return self._same_id is not None and event.get("item_id") == self._same_id

    def _end_message(self) -> bytes:
        return b"".join([*map(self._passed, self._state.ends_of_message(self._text))])

    @property
    def _text(self) -> str:
        """The whole text of the open message."""
        return self._so_far.text[self._state.chars_before :]

    def _of_client(self, kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """The event as one of the client's response."""
        made = {**found}
        if isinstance(index := found.get("output_index"), int):
            made["output_index"] = index + self._shift
        if kind in ENDS:
            made["response"] = self._whole(found.get("response") or {})
            return made
        item = found.get("item") or {}
        if kind == "response.output_item.done" and self._same_id is not None and item.get("id") == self._same_id:
            part = next(iter(item.get("content") or ()), None) or text_part("")
            made["item"] = {**item, "id": self._message_id, "content": [{**part, "text": self._text}]}
        elif self._is_same(found):
            made["item_id"] = self._message_id
            if kind == "response.output_text.done":
                made["text"] = self._text
            elif kind == "response.content_part.done":
                made["part"] = {**(found.get("part") or {}), "text": self._text}
        return made

    @property
    def _message_id(self) -> object:
        return (self._state.message or {}).get("id")

    def _whole(self, response: Mapping[str, Any]) -> dict[str, Any]:
        """The whole response at its end: its items are those that the client has got."""
        envelope = self._so_far.envelope or {}
        return {
            **response,
            **{name: envelope[name] for name in _ENVELOPE if name in envelope},
            "output": self._state.items,
            "usage": self._counted(response.get("usage")),
        }

    def _counted(self, usage: object) -> object:
        """A usage of the whole response."""
        if not isinstance(usage, dict):
            return usage
        counted = whole_usage(usage, self.tokens, "input_tokens", "output_tokens")
        for name in ("input_tokens", "output_tokens"):
            count, details, turn = usage.get(name), counted.get(f"{name}_details"), f"{name}_per_turn"
            if isinstance(count, int) and isinstance(details, dict) and details.get(turn) == [count]:
                counted[f"{name}_details"] = {**details, turn: [counted[name]]}
        return counted


def unseen(text: str, overlap: str) -> tuple[str, str]:
    """The text without the overlap, which the client has and the text begins with, and what of that is yet to come.

    Raises:
        UpstreamError: it begins otherwise.
    """
    common = min(len(overlap), len(text))
    if text[:common] != overlap[:common]:
        raise UpstreamError("the stream broke off: another instance does not go on within a token as the first one did")
    return text[common:], overlap[common:]


def ending_response(so_far: AnswerSoFar, finish_reason: str | None) -> bytes:
    """The last events of a response of which nothing else is missing. ``finish_reason``: ``stop`` or ``length``; None
    where its end has come. The prompt's tokens were not counted, so it has no usage."""
    state = so_far.response
    if finish_reason is None or state is None:
        return b""
    made = []
    events = [] if state.message is None else state.ends_of_message(so_far.text[state.chars_before :])
    for event in events:
        numbered = state.numbered(event)
        so_far.take_response_event(numbered)
        made.append(named_event(numbered))
    is_cut = finish_reason == "length"
    response = {
        **(so_far.envelope or {}),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": state.items,
    }
    last = {"type": "response.completed", "sequence_number": state.next_number, "response": response}
    return b"".join([*made, named_event(last)])
