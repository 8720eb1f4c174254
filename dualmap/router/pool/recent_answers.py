"""The blocks that an instance holds of answers that ended a moment ago, before its KV events report them.

An engine reports a block when a step has filled it, and the report takes a while to the store. A conversation's next
turn that follows at once is placed before: it would be expected to find the answer without its last block or two. A
replica remembers for a moment how far it saw an answer come. Turns of hybrid models are not looked up here: they find
nothing of an answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

from dualmap.runtime.clock import Clock
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.outcome import Usage

KEPT_S: Final = 0.5
"""Longer than events take to the store, also where processes wait for a core; later they know better, as what is
evicted meanwhile is gone."""
MAX_KEPT: Final = 4096
_MAX_BLOCKS: Final = 128
"""Blocks of an answer at most: a prompt that ends further ahead is another one."""
_NONE: Final[dict[int, tuple[int, int]]] = {}


class RecentAnswers:
    """Recent answers of one pool, as far as they went through this replica. Only chains of the engine's own blocks can
    be compared."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: OrderedDict[tuple[str, int], float] = OrderedDict()
        """Times of the ends, by instance and hash of the prompt's last block, the oldest first."""
        self._ended: dict[str, dict[int, tuple[int, int]]] = {}
        """Ended answers of each instance, by the same hash: blocks of the prompt, and tokens that the engine has
        computed."""

    def __len__(self) -> int:
        return len(self._since_s)

    def ended(self, instance_id: str, chain: Chain, usage: Usage) -> None:
        """An answer is complete."""
        output_tokens, hashes = usage.output_tokens, chain.hashes
        if not output_tokens or not isinstance(hashes, array):
            return
        last = hashes[-1]
        computed = chain.prompt_tokens + output_tokens - 1  # the last token of an answer goes through no step
        self._ended.setdefault(instance_id, {})[last] = len(hashes), computed
        self._since_s[instance_id, last] = self._clock.monotonic_s()
        self._since_s.move_to_end((instance_id, last))
        self._forget()

    def cached(self, instance_id: str, chain: Chain, uncached_tokens: int) -> int:
        """The prompt tokens that the instance is expected to find; by its KV metadata, all but ``uncached_tokens``."""
        expected, hashes = chain.prompt_tokens - uncached_tokens, chain.hashes
        if expected < 0:
            expected = 0
        if not self._since_s or not isinstance(hashes, array):
            return expected
        self._forget()
        known, longest, computed = -(-expected // chain.block_tokens), 0, 0
        for last, (blocks, tokens) in self._ended.get(instance_id, _NONE).items():
            near = max(longest, known - _MAX_BLOCKS) < blocks <= min(known, len(hashes))
            if near and hashes[blocks - 1] == last:
                longest, computed = blocks, tokens
        return max(expected, chain.hit_tokens(computed // chain.block_tokens)) if longest else expected

    def _forget(self) -> None:
        since_s, now_s = self._since_s, self._clock.monotonic_s()
        while since_s:
            key = next(iter(since_s))
            if now_s - since_s[key] <= KEPT_S and len(since_s) <= MAX_KEPT:
                return
            del since_s[key]
            instance_id, last = key
            ended = self._ended[instance_id]
            del ended[last]
            if not ended:
                del self._ended[instance_id]
