"""The part of a streamed response (``/v1/responses``) that its client has, but for its text: events, and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

BEGINNINGS: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
"""Events that have a response of which nothing was computed."""
ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})
"""Events that have the whole response."""


class ResponseSoFar:
    """Counts the events of a response, and knows its items. The item that is open is a message, if any."""

    def __init__(self) -> None:
        self.next_number = 0
        """Sequence number of its next event."""
        self.items: list[Mapping[str, Any]] = []
        """Whole items."""
        self.message: Mapping[str, Any] | None = None
        """The open message, as it began."""
        self.output_index = 0
        """Place of the open message in the output."""
        self.has_part = False
        """The open message has a part with its text."""
        self.chars_before = 0
        """Characters of the answer before the open message."""
        self.is_continued = False
        """Another response gives the rest, so its events are not the client's."""

    @property
    def is_between_items(self) -> bool:
        """Whether an item has ended, and no other one has begun."""
        return bool(self.items) and self.message is None

    def count(self, event: Mapping[str, Any]) -> None:
        """Count an event of which the client has got the number."""
        number = event.get("sequence_number")
        if isinstance(number, int):
            self.next_number = number + 1

    def begin_message(self, event: Mapping[str, Any], chars_before: int) -> None:
        """Take the event with which a message is added."""
        self.message, self.has_part, self.chars_before = event["item"], False, chars_before
        index = event.get("output_index")
        self.output_index = index if isinstance(index, int) else len(self.items)

    def end_item(self, event: Mapping[str, Any]) -> None:
        """Take the event with which an item is done."""
        self.items.append(event.get("item") or {})
        self.message = None

    def ends_of_message(self, text: str) -> Sequence[dict[str, Any]]:
        """The events that end the open message, whose whole text this is."""
        message, place = self.message or {}, {"output_index": self.output_index}
        part = text_part(text)
        done = {**message, "status": "completed", "content": [part] if self.has_part else []}
        last = {"type": "response.output_item.done", "sequence_number": 0, **place, "item": done}
        if not self.has_part:
            return [last]
        place |= {"item_id": message.get("id", ""), "content_index": 0}
        return [
            {"type": "response.output_text.done", "sequence_number": 0, **place, "text": text, "logprobs": []},
            {"type": "response.content_part.done", "sequence_number": 0, **place, "part": part},
            last,
        ]

    def numbered(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The event with the number that it has for the client."""
        return {**event, "sequence_number": self.next_number} if "sequence_number" in event else {**event}


def text_part(text: str) -> dict[str, Any]:
    """A part of a message, as vLLM writes it."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def named_event(payload: Mapping[str, Any]) -> bytes:
    """A server-sent event that is named by its type."""
    return b"event: %b\ndata: %b\n\n" % (str(payload["type"]).encode(), orjson.dumps(payload))
