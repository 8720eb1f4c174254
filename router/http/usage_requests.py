"""Whether an instance has to be sent a request for a stream's usage: an operator may have set an engine to send it
unrequested.

The usage event of such an engine is its clients' own, and an answer does not show whether the router's option caused
it. So the first stream to an instance goes as its client sent it, and so does one now and then: it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOOK_AGAIN_S: Final = 60.0
LOOK_AGAIN_STREAMS: Final = 100
"""An instance whose usage is requested is tested again after this time and so many streams: it may have been restarted
with other options. At least 99 % of its streams are counted."""
_MOST: Final = 8192
"""Instances remembered at most."""


@dataclass(slots=True)
class _Known:
    sends_unrequested: bool
    looked_s: float
    requested: int = 0


class UsageRequests:
    """Findings from the streams of this replica, by the URL of the instance."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._known: dict[str, _Known] = {}

    def needed(self, url: str) -> bool:
        """Whether the usage of the next stream to the instance is to be requested, and hidden from its client."""
        known = self._known.get(url)
        if known is None or known.sends_unrequested:
            return False
        now_s = self._now_s()
        if known.requested >= LOOK_AGAIN_STREAMS and now_s - known.looked_s >= LOOK_AGAIN_S:
            known.requested, known.looked_s = 0, now_s
            return False
        known.requested += 1
        return True

    def saw(self, url: str, *, sends_unrequested: bool) -> None:
        """A whole stream showed whether the instance sends its usage unasked."""
        known = self._known.get(url)
        if known is not None and known.sends_unrequested == sends_unrequested:
            return
        if known is None and len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[url] = _Known(sends_unrequested, self._now_s())

    def forget(self, url: str) -> None:
        """The instance may have been restarted."""
        self._known.pop(url, None)
