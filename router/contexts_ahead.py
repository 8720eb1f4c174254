"""What an instance will still hold of a prompt when its prefill begins.

An engine looks a prompt up when it admits it, not when it comes. Where the contexts of the requests ahead of it do not
fit into the KV memory beside its cached prefix, they take the room of that prefix meanwhile: all of it but what they
share with it. A replica knows the chains of the requests that it sent and that are not over, so it can tell what they
leave.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from scheduling.chain import Chain

_ENGINES_OWN_BLOCKS: Final = 1
"""vLLM keeps one block of its memory to itself."""
_COMPARED: Final = 16
"""Requests ahead at most whose chains are compared, the last ones that were sent: the others count as if they shared
nothing. An engine may run hundreds of requests."""


@dataclass(slots=True)
class _Running:
    """On one instance, in the order in which they were sent there."""

    requests: dict[str, tuple[Chain, int]] = field(default_factory=dict)
    """Each one's chain, and the tokens of its prompt and half of its answer: some answers have just begun, others are
    about to end."""
    tokens: int = 0
    """Of all of them."""


class ContextsAhead:
    """Of one pool, the requests that went through this replica. Only chains of the engine's own blocks are compared."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def __len__(self) -> int:
        return sum(len(running.requests) for running in self._running.values())

    def sent(self, instance_id: str, request_id: str, chain: Chain, output_tokens: int) -> None:
        """A request is on its way to the instance, behind all that were sent there before; its answer is expected to
        have so many tokens."""
        if not isinstance(chain.hashes, array):
            return
        self.over(instance_id, request_id)
        running, tokens = self._running.setdefault(instance_id, _Running()), chain.prompt_tokens + output_tokens // 2
        running.requests[request_id] = chain, tokens
        running.tokens += tokens

    def over(self, instance_id: str, request_id: str) -> None:
        """It is over there, or was not sent there."""
        running = self._running.get(instance_id)
        if running is None or (found := running.requests.pop(request_id, None)) is None:
            return
        running.tokens -= found[1]
        if not running.requests:
            del self._running[instance_id]

    def left(self, instance_id: str, chain: Chain, cached_tokens: int, capacity_tokens: int) -> int:
        """Of so many cached tokens of a prompt that is sent now, those that the requests ahead leave it."""
        running, hashes = self._running.get(instance_id), chain.hashes
        if running is None or not cached_tokens or not isinstance(hashes, array):
            return cached_tokens
        block_tokens = chain.block_tokens
        free_tokens = capacity_tokens - _ENGINES_OWN_BLOCKS * block_tokens
        if cached_tokens + running.tokens <= free_tokens:
            return cached_tokens
        most_shared, free_tokens = 0, free_tokens - running.tokens
        for other, tokens in islice(reversed(running.requests.values()), _COMPARED):
            shared_tokens = shared_blocks(hashes, other.hashes) * block_tokens
            most_shared = max(most_shared, shared_tokens)
            own_tokens = -(-(tokens - shared_tokens) // block_tokens) * block_tokens  # in whole blocks
            free_tokens += tokens - own_tokens
        return min(cached_tokens, max(most_shared, free_tokens, 0))


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Blocks at the head of both chains: each hash covers what is before it, so they part once."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda block: one[block] != other[block])
