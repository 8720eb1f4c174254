"""One timer for every deadline of the data plane: a sweep over what is open, instead of a timer per chunk."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

_log = logging.getLogger(__name__)


class HasDeadlines(Protocol):
    def check_deadlines(self, now_s: float) -> None:
        """Compare one's deadlines with the loop's time and act; must not wait."""


class DeadlineChecks:
    """Calls ``check_deadlines`` of everything registered every ``interval_s``; idle (no timer at all) while nothing is.

    A deadline is therefore kept within one interval, which is precise enough for timeouts of seconds.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._open: set[HasDeadlines] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: HasDeadlines) -> None:
        self._open.add(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._check_all)

    def discard(self, item: HasDeadlines) -> None:
        self._open.discard(item)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Stop permanently; what is still registered is not swept again."""
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_all(self) -> None:
        if not self._open:
            self._timer = None
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.interval_s, self._check_all)
        now_s = loop.time()
        for item in tuple(self._open):
            try:
                item.check_deadlines(now_s)
            except Exception:  # one broken connection must not stop the deadlines of all others
                _log.exception("sweep of %r failed", item)
