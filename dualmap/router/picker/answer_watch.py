"""What the picker reads of an answer, as far as the gateway sends it: the first token, its output, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dualmap.router.answers.checks import ABORTED, JSON_STARTS, TRUNCATED, ends_whole, shows_end
from dualmap.router.answers.fields import is_aborted
from dualmap.router.answers.output_marks import EVENT_END, cut_mark, first_outputs, output_mark
from dualmap.router.answers.sse import (
    NO_ENDING,
    Ending,
    EventSplitter,
    ending_of,
    event_object,
    json_object,
    read_ending,
    starts_output,
)
from dualmap.router.answers.usage_scan import UsageScan
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.outcome import InstanceFailure

_TAIL_BYTES: Final = 16 << 10
_LONGEST_EVENT_BYTES: Final = 256 << 10
_LONGEST_LAST_EVENT_BYTES: Final = 8 << 20
"""The last event may repeat a long request, and its usage counts."""


class AnswerWatch:
    """The body of one answer, in pieces as they come."""

    def __init__(self, path: str, *, streamed: bool, on_first_token: Callable[[], None]) -> None:
        """``streamed``: it is a stream of events; any other is only seen whole."""
        self._path = path
        self._streamed = streamed
        self._on_first_token = on_first_token
        self._splitter = EventSplitter(_LONGEST_EVENT_BYTES) if streamed else None
        self._mark = EVENT_END
        self._outputs = 0
        self._body_bytes = 0
        self._scan: UsageScan | None = None
        """Finds the usage of a whole answer that is too long to be kept."""
        self._last: list[bytes] = []
        self._last_bytes = 0

    def feed(self, piece: bytes) -> None:
        if self._splitter is not None:
            self._look_for_output(self._splitter, piece)
        elif self._streamed:
            self._outputs += piece.count(self._mark)
            if self._last and self._last[-1][-1:] != b"\n":  # an event was cut in two
                self._outputs += cut_mark(self._mark, self._last[-1], piece)
        self._body_bytes += len(piece)
        if self._scan is not None:
            self._scan.feed(piece)
            return
        self._last.append(piece)
        self._last_bytes += len(piece)
        if self._streamed:
            if self._last_bytes > 4 * _TAIL_BYTES:
                self._keep_end()
        elif self._last_bytes > _LONGEST_EVENT_BYTES:
            self._scan_on()

    def _look_for_output(self, splitter: EventSplitter, piece: bytes) -> None:
        events = splitter.feed(piece)
        first = next((at for at, event in enumerate(events) if starts_output(event_object(event))), None)
        if first is not None:
            self._mark = output_mark(self._path, events[first])
            self._outputs = first_outputs(self._mark, [*events[first:], splitter.rest])
        elif splitter.too_long:
            self._outputs = 1
        else:
            return
        self._splitter = None
        self._on_first_token()

    def _keep_end(self) -> None:
        """Keep the last events alone; the one that has not come whole with them, however long it is."""
        data = b"".join(self._last)
        start = data.rfind(b"\n\n", 0, max(0, len(data) - _TAIL_BYTES))
        if start >= 0:
            data = data[start + 2 :]
        elif len(data) > _LONGEST_LAST_EVENT_BYTES:
            data = data[-_TAIL_BYTES:]
        self._last, self._last_bytes = [data], len(data)

    def _scan_on(self) -> None:
        data = b"".join(self._last)
        self._last = []
        self._scan = UsageScan()
        if data[:1] in JSON_STARTS:
            self._scan.feed(data)

    def counted(self) -> Counted:
        """What has come of the answer so far."""
        return Counted(self._outputs) if self._streamed else Counted(0, self._body_bytes)

    def left(self) -> Ending:
        """The findings in what has come of a stream that is left before its end."""
        return read_ending(self._last, streamed=True) if self._streamed and self._last else NO_ENDING

    def shows_end(self) -> bool:
        """Whether the last event of a stream has come. Clients leave there, so the end of the body may not follow."""
        return self._streamed and shows_end(self._path, self._last)

    def end(self) -> tuple[Ending, InstanceFailure | None]:
        """The end of a body of which all events have come, and the failure that it shows."""
        if not self._streamed:
            if self._scan is not None:
                return ending_of(self._scan.usage), None
            body = b"".join(self._last)
            failed = ABORTED if is_aborted(json_object(body) or {}) else None
            return read_ending([body], streamed=False), failed
        ending = read_ending(self._last, streamed=True) if self._last else NO_ENDING
        if ending.error_status is None and not ends_whole(self._path, self._last):
            return ending, TRUNCATED
        return ending, ABORTED if ending.aborted else None
