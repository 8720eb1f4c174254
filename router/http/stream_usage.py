"""The usage of streams whose clients did not ask for it: requested from the instance, removed from the client's stream.

vLLM sends it in an event of its own, without choices, before ``[DONE]``; clients that did not ask may expect a choice
there.
"""

from __future__ import annotations

from typing import Final

from router.http.model_field import Edit
from router.http.sse import EventEditor, comments_of, event_object

_OPTION: Final = b'"stream_options":{"include_usage":true},'
_USAGE: Final = b'"usage"'
_MAX_HELD_BYTES: Final = 64 << 10
"""Of an incomplete event; a longer one is not the usage event, and passes in parts."""


def usage_edit(body: bytes) -> Edit:
    """Asks for usage. The body must be a JSON object that has fields, none of them ``stream_options``."""
    start = body.index(b"{") + 1
    return (start, start), _OPTION


def id_edit(body: bytes, answer_id: str) -> Edit:
    """Asks for an id of the response, of ``router.inference_request``'s form. The same holds for the body, which must
    not have a ``request_id``."""
    start = body.index(b"{") + 1
    return (start, start), b'"request_id":"%b",' % answer_id.encode()


class UsageRemover:
    """Passes a stream's bytes on by complete events, except the usage event.

    Bytes that end an event and do not contain "usage" cost two searches; everything else is parsed by event.
    """

    def __init__(self) -> None:
        self._editor = EventEditor(_without_usage, _MAX_HELD_BYTES)

    @property
    def rest(self) -> bytes:
        """An event that is not complete yet. The client gets it when it is, or when the stream ends."""
        return self._editor.rest

    @property
    def between_events(self) -> bool:
        """Whether the bytes passed on so far end with an event."""
        return self._editor.between_events

    def feed(self, pieces: list[bytes]) -> bytes:
        """The client's part of the next bytes; may be empty."""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if data.endswith((b"\n\n", b"\r\n\r\n")) and _USAGE not in data and self._editor.idle:
            return data
        return self._editor.feed(data)


def _without_usage(event: bytes) -> bytes:
    if _USAGE not in event:
        return event
    value = event_object(event)
    is_usage = value is not None and value.get("choices") == [] and isinstance(value.get("usage"), dict)
    return comments_of(event) if is_usage else event
