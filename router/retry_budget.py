"""A limit on retries as a share of traffic, so that its own router does not overload a failing fleet."""

from __future__ import annotations

RETRY_SHARE = 0.2
"""Retries for each request at most; a refused connection costs none."""
RETRIES_PER_S = 10.0
"""Allowed beside the share of requests, so that a quiet fleet may retry as well."""


class RetryBudget:
    """A token bucket: every request adds ``share`` of a retry, every second ``per_s``; a retry takes one."""

    HOARD_S = 10.0
    """Quiet time is worth this many seconds of ``per_s`` at most."""

    def __init__(self, share: float, per_s: float, now_s: float) -> None:
        self._share = share
        self._per_s = per_s
        self._limit = max(1.0, self.HOARD_S * per_s)
        self._tokens = self._limit if per_s > 0 else 0.0
        self._at_s = now_s

    def deposit(self) -> None:
        """A request was accepted."""
        self._tokens = min(self._limit, self._tokens + self._share)

    def available(self, now_s: float) -> float:
        """Retries that could be taken now."""
        self._tokens = min(self._limit, self._tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._tokens

    def withdraw(self, now_s: float) -> bool:
        """Take one retry; False when the budget is spent."""
        if self.available(now_s) < 1.0:
            return False
        self._tokens -= 1.0
        return True
