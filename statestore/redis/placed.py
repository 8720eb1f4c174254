"""Where this process last saw its requests: a hint at the keys to name, checked by every script that takes it."""

from __future__ import annotations

from scheduling.granting import Grant

MAX_PLACED = 131_072
"""Hints kept at most, the oldest dropped first; a missing hint costs one look-up."""
MAX_MOVES = 8
"""A request that moved this often within one call can wait for the next."""


class PlacedRequests:
    """Instance id by request id, bounded in number."""

    def __init__(self) -> None:
        self._instances: dict[str, str] = {}

    def get(self, request_id: str) -> str | None:
        return self._instances.get(request_id)

    def put(self, request_id: str, instance_id: str) -> None:
        self._instances[request_id] = instance_id
        if len(self._instances) > MAX_PLACED:
            del self._instances[next(iter(self._instances))]

    def granted(self, grant: Grant) -> None:
        if grant.request_id in self._instances:
            self._instances[grant.request_id] = grant.instance_id

    def discard(self, request_id: str) -> None:
        self._instances.pop(request_id, None)
