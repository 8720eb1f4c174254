"""Whether an instance is sent a request for a stream's usage, and whether its client is to see that usage: an operator
may have set an engine to send it unrequested.

The usage event of such an engine is its clients' own, and an answer does not show whether the router's option caused
it. So usage is requested from the first stream on, and hidden; one stream now and then goes as its client sent it: it
shows. Streams that tokens are charged for are never tested so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

LOOK_AGAIN_S: Final = 60.0
LOOK_AGAIN_STREAMS: Final = 100
"""An instance whose usage is requested is tested again after this time and so many streams: it may have been restarted
with other options. At least 99 % of its streams are counted by it."""
_MOST: Final = 8192
"""Instances remembered at most."""


class UsageRequest(NamedTuple):
    """The decision about the usage of one stream."""

    requests: bool
    hides: bool
    """The client is not to see it."""


AS_SENT: Final = UsageRequest(False, False)
_HIDDEN: Final = UsageRequest(True, True)
_SHOWN: Final = UsageRequest(True, False)


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

    def next(self, url: str, *, is_charged: bool) -> UsageRequest:
        """Decide about the usage of the next stream to the instance. ``is_charged``: its tokens are."""
        known = self._known.get(url)
        if known is None:
            known = self._learn(url, sends_unrequested=False)
            known.requested = LOOK_AGAIN_STREAMS  # the first test comes as soon as the time for it has passed
        if known.sends_unrequested:
            return _SHOWN if is_charged else AS_SENT
        if is_charged:
            return _HIDDEN
        now_s = self._now_s()
        if known.requested >= LOOK_AGAIN_STREAMS and now_s - known.looked_s >= LOOK_AGAIN_S:
            known.requested, known.looked_s = 0, now_s
            return AS_SENT
        known.requested += 1
        return _HIDDEN

    def saw(self, url: str, *, sends_unrequested: bool) -> None:
        """A whole stream showed whether the instance sends its usage unasked."""
        known = self._known.get(url)
        if known is None or known.sends_unrequested != sends_unrequested:
            self._learn(url, sends_unrequested=sends_unrequested)

    def restarted(self, url: str) -> None:
        """The instance may have been restarted, with other options: it is tested as soon as the time for that has
        passed. Until then it counts as it was."""
        known = self._known.get(url)
        if known is not None:
            known.requested = LOOK_AGAIN_STREAMS

    def _learn(self, url: str, *, sends_unrequested: bool) -> _Known:
        if url not in self._known and len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        known = self._known[url] = _Known(sends_unrequested, self._now_s())
        return known
