"""A limit on retries as a share of traffic, so that its own router does not overload a failing fleet."""

from __future__ import annotations

from collections.abc import Callable

RETRY_SHARE = 0.2
"""Retries for each request at most; a refused connection costs none."""
RETRIES_PER_S = 10.0
"""Retries per second allowed beside the share of requests, so that a quiet fleet may retry as well."""
CONTINUATION_SHARE = 1.0
"""Answers that may go on elsewhere, for each request at most: each of them once, on the average."""


class RetryBudget:
    """A token bucket: every request adds ``share`` of a retry, every second ``per_s``; a retry takes one.

    It reads how many requests were accepted when a retry is requested, so a request that needs none costs nothing.
    """

    BURST_S = 10.0
    """Quiet time is worth this many seconds of ``per_s`` at most."""

    def __init__(
        self,
        share: float,
        per_s: float,
        now_s: float,
        accepted: Callable[[], int] = lambda: 0,
        *,
        burst: float | None = None,
    ) -> None:
        """``accepted`` gives the number of requests since the start; it only grows. ``burst``: the most that may be
        taken at once, instead of ``BURST_S`` seconds' worth."""
        self._share = share
        self._per_s = per_s
        self._limit = max(1.0, self.BURST_S * per_s) if burst is None else burst
        self._tokens = self._limit if per_s > 0 or burst is not None else 0.0
        self._at_s = now_s
        self._accepted = accepted
        self._counted = accepted()

    def available(self, now_s: float) -> float:
        """Retries that could be taken now."""
        accepted = self._accepted()
        earned = (accepted - self._counted) * self._share + (now_s - self._at_s) * self._per_s
        self._tokens = min(self._limit, self._tokens + earned)
        self._at_s, self._counted = now_s, accepted
        return self._tokens

    def withdraw(self, now_s: float) -> bool:
        """Take one retry; False when the budget is spent."""
        if self.available(now_s) < 1.0:
            return False
        self._tokens -= 1.0
        return True
