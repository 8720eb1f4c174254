"""What an instance holds of answers that ended a moment ago, before its KV events tell.

An engine reports a block when a step has filled it, and the report takes a while to the store. A conversation's next
turn that follows at once is placed before: it would be expected to find the answer without its last block or two. A
replica remembers for a moment how far it saw an answer come.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

from router.outcome import Usage
from scheduling.chain import Chain
from statestore.clock import Clock

KEPT_S: Final = 0.5
"""Longer than events take to the store, also where processes wait for a core; later they know better, as what is
evicted meanwhile is gone."""
MAX_KEPT: Final = 4096
_MAX_BLOCKS: Final = 128
"""Blocks of an answer at most that are looked through for the end of the prompt before it."""


class RecentAnswers:
    """Of one pool, as far as they went through this replica. Only chains of the engine's own blocks can be compared."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: OrderedDict[tuple[str, int], tuple[float, int]] = OrderedDict()
        """By instance and hash of the prompt's last block: time, and tokens that the engine has computed."""

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, instance_id: str, chain: Chain, usage: Usage) -> None:
        """An answer is complete."""
        output_tokens = usage.output_tokens
        if not output_tokens or not isinstance(chain.hashes, array):
            return
        key = instance_id, chain.hashes[-1]
        computed = chain.prompt_tokens + output_tokens - 1  # the last token of an answer goes through no step
        self._ended[key] = self._clock.monotonic_s(), computed
        self._ended.move_to_end(key)
        self._forget()

    def cached(self, instance_id: str, chain: Chain, uncached_tokens: int) -> int:
        """The prompt tokens that the instance is expected to find; by its KV metadata, all but ``uncached_tokens``."""
        expected = max(0, chain.prompt_tokens - uncached_tokens)
        hashes = chain.hashes
        if not self._ended or not isinstance(hashes, array):
            return expected
        self._forget()
        known = -(-expected // chain.block_tokens)
        for blocks in range(min(known, len(hashes)), max(0, known - _MAX_BLOCKS), -1):
            found = self._ended.get((instance_id, hashes[blocks - 1]))
            if found is not None:
                return max(expected, chain.hit_tokens(found[1] // chain.block_tokens))
        return expected

    def _forget(self) -> None:
        ended, now_s = self._ended, self._clock.monotonic_s()
        while ended:
            key = next(iter(ended))
            if now_s - ended[key][0] <= KEPT_S and len(ended) <= MAX_KEPT:
                return
            del ended[key]
