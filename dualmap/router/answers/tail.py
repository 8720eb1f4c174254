"""The last bytes of an answer, in which its usage and its end are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dualmap.router.answers.checks import TAIL_BYTES
from dualmap.router.answers.sse import EVENT_END

MAX_LAST_EVENT_BYTES: Final = 8 << 20
"""An event is kept up to this until the next ones have come: the last one may repeat a long request, and its usage
counts."""
_WHOLE_EVENTS: Final = 3
"""Pieces with this many ends of events have two whole ones, if more follow: one with the usage, and one behind it."""


class Tail:
    """The last pieces of a body, behind the earlier ones. The earlier ones are dropped once the last ones are
    ``TAIL_BYTES`` long, so that both together are never shorter, and a piece costs nothing but its place in a list."""

    def __init__(self, *, of_events: bool) -> None:
        """``of_events``: the last events are to be whole."""
        self._of_events = of_events
        self._earlier: Sequence[bytes] = ()
        self._last: list[bytes] = []
        self._bytes = 0
        """Those of the last pieces."""

    def add(self, piece: bytes) -> None:
        """Take the next piece."""
        self._last.append(piece)
        self._bytes += len(piece)
        if self._bytes >= TAIL_BYTES and (not self._of_events or self._has_whole_events()):
            self._earlier, self._last, self._bytes = self._last, [], 0

    @property
    def pieces(self) -> Sequence[bytes]:
        """The last pieces, ``TAIL_BYTES`` or more."""
        return [*self._earlier, *self._last] if self._earlier else self._last

    def joined(self) -> bytes:
        return b"".join(self.pieces)

    def _has_whole_events(self) -> bool:
        if self._bytes > MAX_LAST_EVENT_BYTES:
            return True
        data = b"".join(self._last)
        self._last = [data]
        return data.count(b"\n\n") >= _WHOLE_EVENTS or (b"\r" in data and len(EVENT_END.findall(data)) >= _WHOLE_EVENTS)
