"""KV that finished prompts left behind for a transfer: it occupies its blocks until it is pulled, or times out."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class HeldKv:
    """Blocks that one request holds in a pool."""

    hashes: tuple[int, ...]
    """Blocks that are in the prefix cache."""
    private_blocks: int


@dataclass(frozen=True, slots=True)
class Staged:
    kv: HeldKv
    tokens: int
    expires_s: float


class StagedKv:
    """Staged KV by request id. All time out after the same time, so the first to be staged is the first to expire."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._staged: OrderedDict[str, Staged] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._staged

    def __len__(self) -> int:
        return len(self._staged)

    def add(self, request_id: str, kv: HeldKv, tokens: int, now_s: float) -> None:
        self._staged[request_id] = Staged(kv, tokens, now_s + self._timeout_s)

    def take(self, request_id: str) -> HeldKv | None:
        """End the staging of a request and return its KV; None if it was not staged."""
        staged = self._staged.pop(request_id, None)
        return None if staged is None else staged.kv

    def next_expiry_s(self) -> float | None:
        return next(iter(self._staged.values())).expires_s if self._staged else None

    def take_expired(self, now_s: float) -> list[tuple[str, Staged]]:
        """End the staging of what has timed out at ``now_s``, and return it, the first first."""
        expired = list(takewhile(lambda entry: entry[1].expires_s <= now_s, self._staged.items()))
        for request_id, _ in expired:
            del self._staged[request_id]
        return expired
