"""Moves of KV from a prefill to a decode instance: what they cost, and the links that they share.

A move takes a latency, and its bytes over the bandwidth of the link at each end. A link serves moves one after the
other, in the order in which they were requested; the two ends do not wait for each other. So a move ends when the
slower end is through with it:

    latency + max over both ends of (time until the link is free + bytes / bandwidth)
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """The cost of a move of KV on an instance's link."""

    bytes_per_token: int = 57_344
    """KV of one token, over all layers (the default is Qwen2.5-7B's in 16 bits)."""
    bytes_per_s: float = 20e9
    latency_s: float = 0.005
    """Fixed time of every move: handshake, descriptors of its blocks, and the notice of its end."""

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1 or not 0 < self.bytes_per_s < math.inf or not 0 <= self.latency_s < math.inf:
            raise ValueError(
                "a transfer needs bytes per token and bytes per second above 0, and a latency of 0 or more"
            )

    @property
    def tokens_per_s(self) -> float:
        return self.bytes_per_s / self.bytes_per_token

    def alone_s(self, tokens: int) -> float:
        """Time of one move over idle links."""
        return self.latency_s + tokens / self.tokens_per_s


class KvLinks:
    """The links of a fleet's instances, all of one kind."""

    def __init__(self, transfer: KvTransfer) -> None:
        self._transfer = transfer
        self._free_s: dict[str, float] = {}
        self.moved_tokens = 0

    def move(self, source_id: str, target_id: str, tokens: int, now_s: float) -> float:
        """Begin a move; when it ends. Times of calls must not go back."""
        self.moved_tokens += tokens
        busy_s = tokens / self._transfer.tokens_per_s
        return self._transfer.latency_s + max(
            self._occupy(source_id, busy_s, now_s), self._occupy(target_id, busy_s, now_s)
        )

    def _occupy(self, instance_id: str, busy_s: float, now_s: float) -> float:
        free_s = self._free_s[instance_id] = max(now_s, self._free_s.get(instance_id, now_s)) + busy_s
        return free_s
