"""What the picker reads of an answer, as far as the gateway sends it: the first token, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dualmap.router.http.answer_checks import ABORTED, TRUNCATED, ends_whole, shows_end
from dualmap.router.http.sse import NO_ENDING, Ending, EventSplitter, event_object, read_ending, starts_output
from dualmap.scheduling.request.outcome import InstanceFailure

_TAIL_BYTES: Final = 16 << 10
_LONGEST_EVENT_BYTES: Final = 256 << 10


class AnswerWatch:
    """The body of one answer, in pieces as they come."""

    def __init__(self, path: str, *, streamed: bool, on_first_token: Callable[[], None]) -> None:
        """``streamed``: it is a stream of events; any other is only seen whole."""
        self._path = path
        self._streamed = streamed
        self._on_first_token = on_first_token
        self._splitter = EventSplitter(_LONGEST_EVENT_BYTES) if streamed else None
        self._last: list[bytes] = []
        self._last_bytes = 0

    def feed(self, piece: bytes) -> None:
        splitter = self._splitter
        if splitter is not None:
            events = splitter.feed(piece)
            if splitter.too_long or any(starts_output(event_object(event)) for event in events):
                self._splitter = None
                self._on_first_token()
        self._last.append(piece)
        self._last_bytes += len(piece)
        if self._last_bytes > 4 * _TAIL_BYTES:
            tail = b"".join(self._last)[-_TAIL_BYTES:]
            self._last, self._last_bytes = [tail], len(tail)

    def shows_end(self) -> bool:
        """Whether the last event of a stream has come. Clients leave there, so the end of the body may not follow."""
        return self._streamed and shows_end(self._path, self._last)

    def end(self) -> tuple[Ending, InstanceFailure | None]:
        """The end of a body of which all events have come, and the failure that it shows."""
        ending = read_ending(self._last, streamed=self._streamed) if self._last else NO_ENDING
        if self._streamed and ending.error_status is None and not ends_whole(self._path, self._last):
            return ending, TRUNCATED
        return ending, ABORTED if ending.aborted else None
