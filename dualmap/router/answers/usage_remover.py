"""The usage of streams whose clients did not ask for it is removed from the client's stream.

vLLM sends it in an event of its own, without choices, before ``[DONE]``; clients that did not ask may expect a choice
there.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import orjson

from dualmap.router.answers.sse import EventEditor, comments_of, event_object

_USAGE: Final = b'"usage"'
_STOPPED: Final = b'"finish_reason":"'
_SPACED_STOP: Final = b'"finish_reason": "'
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_MAX_BEHIND_BYTES: Final = 64
"""Most bytes of comments that wait behind the event with the finish reason: more mean that the next event does not come
soon."""
_MAX_HELD_BYTES: Final = 64 << 10
"""Most bytes of an incomplete event that are held; a longer one is not the usage event, and passes in parts."""


class UsageRemover:
    """Passes a stream's bytes on by complete events, except the usage event.

    vLLM puts ``system_fingerprint`` into its last event, and that is the usage event of a stream that has it requested:
    it goes back to the event with the finish reason, which waits for that, and so does a comment behind it. An instance
    that counts usage beside a choice does so unasked, and its stream passes as it is.

    Bytes that end an event and have neither "usage" nor a finish reason cost a few searches; everything else is parsed
    by event.
    """

    idle = True
    """The next byte begins an event, and none waits."""

    def __init__(self) -> None:
        self._kept_back = _KeptBack()

    @cached_property
    def _editor(self) -> EventEditor:
        """Made for the first bytes that are parsed by event: many streams have none."""
        kept_back = self._kept_back
        return EventEditor(kept_back.edited, _MAX_HELD_BYTES, comment=kept_back.passed, release=kept_back.release)

    @property
    def sends_unrequested(self) -> bool:
        """Whether the instance sends usage without a request for it."""
        return self._kept_back.sends_unrequested

    @property
    def held(self) -> bytes:
        """A whole event that was not passed on yet, and comments."""
        return self._kept_back.last + self._kept_back.behind

    def end(self) -> bytes:
        """The client's part of what was not passed on yet, of a stream that is over."""
        if self.idle:
            return b""
        rest = self._editor.end()
        return rest + self._kept_back.release()

    @property
    def between_events(self) -> bool:
        """Whether the bytes passed on so far end with an event."""
        return self._editor.between_events

    def feed(self, data: bytes) -> bytes:
        """The client's part of the next bytes; may be empty."""
        if self.idle and (
            (data.endswith(_EVENT_ENDS) and _USAGE not in data and _STOPPED not in data and _SPACED_STOP not in data)
            or self._kept_back.sends_unrequested
        ):
            return data
        passed_on = self._editor.feed(data)
        self.idle = self._editor.idle and not self._kept_back.last
        return passed_on


class _KeptBack:
    """What is kept back of a stream until its next event. The editor of the stream refers to this, and this to nothing:
    a cycle would have every stream wait for the garbage collector."""

    sends_unrequested = False
    last = b""
    """The event with the finish reason, while the next one is awaited."""
    behind = b""
    """Comments that came after it."""

    def release(self) -> bytes:
        """Pass on what waits for the next event, which does not come whole, or not at all."""
        waiting, self.last, self.behind = self.last + self.behind, b"", b""
        return waiting

    def passed(self, comment: bytes) -> bytes:
        """The bytes to pass on when a comment comes."""
        if not self.last:
            return comment
        self.behind += comment
        return self.release() if len(self.behind) > _MAX_BEHIND_BYTES else b""

    def edited(self, event: bytes) -> bytes:
        """The bytes to pass on when an event comes."""
        last, behind, waiting = self.last, self.behind, self.release()
        is_last = not self.sends_unrequested and (_STOPPED in event or _SPACED_STOP in event)
        value = event_object(event) if is_last or _USAGE in event else None
        if value is None or self.sends_unrequested:
            return waiting + event
        choices, has_usage = value.get("choices"), isinstance(value.get("usage"), dict)
        if choices == [] and has_usage:
            return _with_fingerprint(last, value.get("system_fingerprint")) + behind + comments_of(event)
        if choices and has_usage:
            self.sends_unrequested = True
        elif is_last:
            self.last = event
            return waiting
        return waiting + event


def _with_fingerprint(event: bytes, fingerprint: object) -> bytes:
    end = event.rfind(b"}")
    if fingerprint is None or end < 0 or b'"system_fingerprint"' in event:
        return event
    return event[:end] + b',"system_fingerprint":' + orjson.dumps(fingerprint) + event[end:]
