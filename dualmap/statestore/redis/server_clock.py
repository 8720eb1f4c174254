"""The clock of a server as a client knows it: by what it told, and by what has passed here since."""

from __future__ import annotations


class ServerClock:
    """Bounds of the difference between a server's clock, in milliseconds, and this process's monotonic one, in seconds.

    A server reads its time at some moment between the call and the reply, which bounds the difference from both sides.
    Each further time narrows the bounds; one that contradicts them replaces them, since the server's clock was set. A
    time read from this is never later than the server's own, so that what must not act after it does not.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._least_ms = self._most_ms = 0.0

    def observe(self, now_ms: int, sent_s: float, answered_s: float) -> None:
        """The server replied this time to a question of ``sent_s``."""
        least_ms, most_ms = now_ms - answered_s * 1000, now_ms + 1 - sent_s * 1000
        if not self.is_known or least_ms > self._most_ms or most_ms < self._least_ms:
            self._least_ms, self._most_ms = least_ms, most_ms
        else:
            self._least_ms, self._most_ms = max(least_ms, self._least_ms), min(most_ms, self._most_ms)
        self.is_known = True

    def set(self, now_ms: int, answered_s: float) -> None:
        """The server's time shows that the bounds do not hold any more: begin again from it."""
        self._least_ms = self._most_ms = now_ms - answered_s * 1000
        self.is_known = True

    def time_ms(self, at_s: float) -> int:
        """The server's time at a moment of this process, or a little less."""
        assert self.is_known, "asked first"
        return int(self._least_ms + at_s * 1000)
