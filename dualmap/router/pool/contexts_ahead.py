"""The cached part of a prompt that an instance will still hold when the prefill begins.

An engine looks a prompt up when it admits it, not when it comes. Meanwhile the requests ahead of it take memory, and
the engine evicts what was used least recently. So as much of a cached prefix is left as fits beside the contexts that
are used after it: those of the requests ahead, and those that ended after the prefix was used last (its stack distance,
R. L. Mattson et al., "Evaluation techniques for storage hierarchies", 1970). What it shares with them stays.

A replica knows the chains of the requests that it sent. For requests that other replicas sent, it knows how many run
and the sum of their contexts, which the store counts; they are taken to share as much as its own requests share with
each other. It does not know which contexts of other replicas have ended.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median_low
from typing import Final

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import Running

_ENGINES_OWN_BLOCKS: Final = 1
"""vLLM keeps one block of its memory to itself."""
_COMPARED: Final = 16
"""Requests ahead at most whose chains are compared, the last ones that were sent: the others count as if they shared
nothing. An engine may run hundreds of requests."""
_ENDED: Final = 32
"""Contexts that are over and remembered, of each instance."""
_MAX_INSTANCES: Final = 1024
"""Most instances that are remembered. With more, what has ended on those that run nothing is forgotten: instances come
and go."""
_REMEMBERED: Final = 15
"""Requests, the last ones, from which the others' are guessed."""


@dataclass(slots=True)
class _Known:
    """The requests that this replica sent to one instance, in their order."""

    requests: dict[str, tuple[Chain, int]] = field(default_factory=dict)
    """Each one's chain, and the expected tokens of its answer."""
    prompt_tokens: int = 0
    """Prompt tokens of all requests."""
    output_tokens: int = 0
    releasing: dict[str, int] = field(default_factory=dict)
    """Tokens of the contexts of requests that are over, and that the store may count still, by id."""
    ended: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Contexts that ended last, by the hash of the prompt's last block: the hash of its first block, its blocks, and
    tokens of the context. In the order in which they ended, without those that another one continued."""

    def leave(self, chain: Chain, output_tokens: int) -> None:
        """The request is over."""
        self.prompt_tokens -= chain.prompt_tokens
        self.output_tokens -= output_tokens
        if chain.hashes:
            first, last = chain.hashes[0], chain.hashes[-1]
            self.ended.pop(last, None)
            self.ended[last] = first, len(chain.hashes), chain.prompt_tokens + output_tokens
        if len(self.ended) > _ENDED:
            del self.ended[next(iter(self.ended))]

    def continue_with(self, hashes: Sequence[int]) -> None:
        """A prompt uses what it continues: that is as recent as itself."""
        for last in self._continued_by(hashes):
            del self.ended[last]

    def _continued_by(self, hashes: Sequence[int]) -> list[int]:
        """The ended contexts with which a chain begins: their last block is in the chain, too."""
        if not hashes:
            return []
        own, most = hashes[0], len(hashes)
        return [
            last
            for last, (first, blocks, _) in self.ended.items()
            if first == own and blocks <= most and hashes[blocks - 1] == last
        ]

    def newer_tokens(self, hashes: Sequence[int], shared_tokens: int) -> int:
        """Tokens of the contexts that ended after the one that the prompt continues, each sharing this many tokens with
        it; 0 where it is not known to continue one."""
        continued = self._continued_by(hashes)
        if not continued:
            return 0
        newer_tokens = 0
        for last, (*_, tokens) in reversed(self.ended.items()):
            if last == continued[-1]:
                break
            newer_tokens += max(0, tokens - shared_tokens)
        return newer_tokens


class ContextsAhead:
    """The contexts of one pool. Only chains of the engine's own blocks are compared."""

    def __init__(self, is_releasing: Callable[[str], bool] = lambda _: False) -> None:
        """Make an empty memory. ``is_releasing``: whether the release of a request that is over is being sent to the
        store."""
        self._is_releasing = is_releasing
        self._known: dict[str, _Known] = {}
        self._last: Chain | None = None
        self._shared_tokens: deque[int] = deque(maxlen=_REMEMBERED)
        """Tokens that each of the last requests shares with the one before."""
        self._output_tokens: deque[int] = deque(maxlen=_REMEMBERED)
        """Expected output tokens of each of the last requests."""

    def __len__(self) -> int:
        return sum(len(known.requests) for known in self._known.values())

    def sent(self, instance_id: str, request_id: str, chain: Chain, output_tokens: int) -> None:
        """A request was sent to the instance, behind all that were sent there before; its answer is expected to have so
        many tokens."""
        if not isinstance(chain.hashes, array):
            return
        known = self._known_on(instance_id)
        if request_id in known.requests:
            self.over(instance_id, request_id)
        known.continue_with(chain.hashes)
        known.requests[request_id] = chain, output_tokens
        known.prompt_tokens += chain.prompt_tokens
        known.output_tokens += output_tokens
        self._output_tokens.append(output_tokens)
        last, self._last = self._last, chain
        if last is not None and (shared := shared_blocks(chain.hashes, last.hashes)) < len(last.hashes):
            self._shared_tokens.append(shared * chain.block_tokens)

    def _known_on(self, instance_id: str) -> _Known:
        known = self._known.get(instance_id)
        if known is None:
            if len(self._known) >= _MAX_INSTANCES:
                self._known = {name: each for name, each in self._known.items() if each.requests}
            known = self._known[instance_id] = _Known()
        return known

    def over(self, instance_id: str, request_id: str) -> None:
        """The request is over there, or was not sent there."""
        known = self._known.get(instance_id)
        found = None if known is None else known.requests.pop(request_id, None)
        if known is not None and found is not None:
            known.leave(*found)
            self._forget_released(known)
            known.releasing[request_id] = found[0].prompt_tokens + found[1]

    def _forget_released(self, known: _Known) -> None:
        for request_id in tuple(known.releasing):
            if not self._is_releasing(request_id):
                del known.releasing[request_id]

    def left(
        self, instance_id: str, chain: Chain, cached_tokens: int, capacity_tokens: int, running: Running | None = None
    ) -> int:
        """The cached tokens that the requests ahead leave a prompt that is sent now. ``running`` is what the store
        counted there without it; None: unknown, so that no other replica's requests count."""
        hashes, block_tokens = chain.hashes, chain.block_tokens
        if not cached_tokens or not isinstance(hashes, array):
            return cached_tokens
        known = self._known.get(instance_id) or _NOTHING_KNOWN
        others = self._others(known, running)
        if not known.requests and not others:
            return cached_tokens
        usually_shared = median_low(self._shared_tokens or (0,))
        taken_tokens = self._taken_by(others, known, running, usually_shared, block_tokens)
        if not known.requests and not taken_tokens:
            return cached_tokens  # nothing is evicted
        taken_tokens += known.newer_tokens(hashes, usually_shared)
        known_tokens = known.prompt_tokens + known.output_tokens // 2
        free_tokens = capacity_tokens - _ENGINES_OWN_BLOCKS * block_tokens - taken_tokens - known_tokens
        if cached_tokens <= free_tokens:
            return cached_tokens
        most_shared = usually_shared if others else 0
        for other, output_tokens in islice(reversed(known.requests.values()), _COMPARED):
            shared_tokens = shared_blocks(hashes, other.hashes) * block_tokens
            most_shared = max(most_shared, shared_tokens)
            tokens = other.prompt_tokens + output_tokens // 2
            free_tokens += tokens - _in_blocks(tokens - shared_tokens, block_tokens)
        return min(cached_tokens, max(most_shared, free_tokens // block_tokens * block_tokens))

    def _others(self, known: _Known, running: Running | None) -> int:
        """How many requests other replicas sent there."""
        if running is None:
            return 0
        self._forget_released(known)
        # Calls are answered in order: what is not yet known to be released was counted when this prompt was placed.
        return max(0, running.running_requests - len(known.requests) - len(known.releasing))

    def _taken_by(
        self, others: int, known: _Known, running: Running | None, shared_tokens: int, block_tokens: int
    ) -> int:
        """The tokens that the requests of other replicas take beside those that each shares."""
        if not others or running is None:
            return 0
        output_tokens = median_low(self._output_tokens or (0,))
        own_tokens = known.prompt_tokens + known.output_tokens + sum(known.releasing.values())
        contexts_tokens = running.context_tokens - own_tokens
        rest_tokens = output_tokens // 2 - block_tokens // 2  # of an answer; half of their last block is empty
        return max(0, contexts_tokens - others * (shared_tokens + rest_tokens))


_NOTHING_KNOWN: Final = _Known()


def _in_blocks(tokens: int, block_tokens: int) -> int:
    """The tokens of the whole blocks that this many tokens take."""
    return -(-tokens // block_tokens) * block_tokens


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Blocks at the head of both chains: each hash covers what is before it, so they part once."""
    most = min(len(one), len(other))
    if not most or one[0] != other[0]:  # as most are
        return 0
    if one[most - 1] == other[most - 1]:  # as turns of one conversation are
        return most
    return bisect_left(range(most), True, key=lambda block: one[block] != other[block])
