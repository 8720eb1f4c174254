"""Adaptive key length: which prefixes are so popular that their requests must spread.

Source: DualMap (ICLR 2026), prefix hotness tree. The tree is a set of hot prefixes that is closed upwards:
a hot node of depth d > 1 has a hot parent. A request's hash key is the first prefix of its chain that is not
hot, so a hot leaf "gets children" by entering the set and loses them by leaving it. Where all full blocks are hot
the key takes in the partial last one: a popular system prompt with short questions must spread, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.values import value

MAX_KEY_BLOCKS = 64
"""The longest hash key, and what the arrival log keeps of a chain."""
WINDOW_REQUESTS = 4096
"""Requests in the window at most: those of a window of 256 instances, see ``HotnessRule``."""
MIN_KEY_BLOCKS = 2
"""The paper's ordinary length. A root that half of all traffic shares says nothing of where a request belongs. A
request for an adapter belongs where the adapter is: its ordinary key is the adapter alone."""


@value
class HashKey:
    """The hash key of a prompt by one view of the fleet: the prefix that its requests are spread by."""

    blocks: int
    """The length of the prefix in key blocks."""
    hash: int
    hot_tokens: int
    """Tokens of the prompt's hot prefix, see ``HotnessTree.hot_tokens``."""
    epoch: int
    """The view's membership epoch."""
    tree_version: int


@dataclass(frozen=True, slots=True)
class HotnessTree:
    """The hot prefixes of one pool: prefix hash to depth in blocks (1 = one block long)."""

    hot: Mapping[int, int] = field(default_factory=dict)

    def key_blocks(self, chain: Chain, max_key_blocks: int = MAX_KEY_BLOCKS) -> int:
        """Length of the chain's hash key in key blocks, 1..max_key_blocks; a partial last one counts as one."""
        hot, hashes, root = self.hot, chain.key_hashes, chain.root
        usual = MIN_KEY_BLOCKS if root is None else 1
        least = max_key_blocks if max_key_blocks < usual else usual
        if len(hashes) < least:
            least = len(hashes)
        if not hot or hashes[0] not in hot:
            return least
        own = len(hashes) - (root is not None)
        is_whole = chain.tail_hash is None and own * chain.key_stride >= len(chain.hashes)
        limit = min(len(hashes) if is_whole else len(hashes) + 1, max_key_blocks)
        depth = 0
        while depth < limit - 1 and hashes[depth] in hot:
            depth += 1
        return max(depth + 1, least)

    def hot_tokens(self, chain: Chain) -> int:
        """Tokens of the chain's longest hot prefix, whose requests spread; 0 where its ordinary key is not hot."""
        hot = self.hot
        if not hot:
            return 0
        hashes = chain.key_hashes
        if len(hashes) < MIN_KEY_BLOCKS or hashes[MIN_KEY_BLOCKS - 1] not in hot:
            return 0
        # A hot prefix has hot parents: the first one that is not hot is found by halving.
        blocks = bisect_left(hashes, True, MIN_KEY_BLOCKS, key=lambda each: each not in hot)
        own = blocks if chain.root is None else blocks - 1
        return min(own * chain.key_stride * chain.block_tokens, chain.prompt_tokens)

    def key(self, chain: Chain, max_key_blocks: int = MAX_KEY_BLOCKS) -> int:
        """The hash key: the prefix hash at the key length."""
        return chain.prefix_hash(self.key_blocks(chain, max_key_blocks))


@dataclass(frozen=True, slots=True)
class HotnessRule:
    """When a prefix becomes hot and when it cools; shares are of all requests in the window."""

    hot_share_factor: float = 2.0
    """Above this over the number of ready instances it is hot."""
    cold_share_factor: float = 1.0
    """Below this it is cold again; the band between the two keeps prefixes from flapping."""
    min_requests: int = 32
    """Requests seen before any prefix counts as hot."""
    requests_per_instance: int = 16
    """Requests per instance that make the window, up to ``WINDOW_REQUESTS``. A prefix becomes hot after twice as many
    requests of its own, at any rate, and a hot spot that moved is forgotten as soon."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One routed request as the hotness job reads it."""

    entry_id: str
    """Position in the pool's arrival log; pass the last one seen to read on."""
    at_ms: int
    head: tuple[int, ...]
    """The first hashes of its chain (the store keeps a bounded number)."""


FREQUENT_COUNT = 4
"""Prefixes seen at least this often in the window are indexed: only they can be hot once traffic flows."""


class HotnessWindow:
    """The requests of a sliding window, counted by prefix. Owned by one keeper; not shared.

    Bounded by age, by number, and by the number of instances when the tree grows; heads longer than ``max_key_blocks``
    are cut. The few prefixes that many requests share are indexed as they are counted, so that ``grow`` does not walk
    through the window.
    """

    def __init__(
        self, window_ms: int, max_requests: int = WINDOW_REQUESTS, max_key_blocks: int = MAX_KEY_BLOCKS
    ) -> None:
        self._window_ms = window_ms
        self._max_requests = max_requests
        self._max_key_blocks = max_key_blocks
        self._entries: deque[tuple[int, tuple[int, ...]]] = deque()
        self._counts: dict[int, int] = {}
        self._frequent: dict[int, int] = {}
        """Prefixes counted FREQUENT_COUNT times or more, with their depth in blocks."""

    @classmethod
    def of(cls, settings: SchedulingSettings) -> HotnessWindow:
        return cls(int(settings.hotness_window_s * 1000))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, at_ms: int, hashes: Sequence[int]) -> None:
        """Count one request; times must not go back by more than the window."""
        head = tuple(hashes[: self._max_key_blocks])
        self._entries.append((at_ms, head))
        counts = self._counts
        for depth, prefix in enumerate(head, 1):
            count = counts.get(prefix, 0) + 1
            counts[prefix] = count
            if count == FREQUENT_COUNT:
                self._frequent[prefix] = depth
        if len(self._entries) > self._max_requests:
            self._drop_oldest()

    def expire(self, now_ms: int) -> None:
        """Forget what is older than the window."""
        while self._entries and self._entries[0][0] <= now_ms - self._window_ms:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, head = self._entries.popleft()
        counts = self._counts
        for prefix in head:
            left = counts[prefix] - 1
            if left:
                counts[prefix] = left
            else:
                del counts[prefix]
            if left == FREQUENT_COUNT - 1:
                del self._frequent[prefix]

    def count(self, prefix: int) -> int:
        """Requests in the window whose chain starts with this prefix."""
        return self._counts.get(prefix, 0)

    def grow(self, tree: HotnessTree, ready_instances: int, rule: HotnessRule) -> HotnessTree:
        """The tree after this moment's traffic; ``tree`` itself when nothing changes.

        A prefix enters above ``hot_share_factor / n`` and leaves below ``cold_share_factor / n``; the band
        between keeps the mapping from flapping. Below ``min_requests`` the tree stays as it is.

        Every request that counts for a prefix counts for its parent, so a hot prefix always has a hot parent: the
        result is closed upwards if ``tree`` is.
        """
        while len(self._entries) > max(rule.min_requests, rule.requests_per_instance * ready_instances):
            self._drop_oldest()
        total = len(self._entries)
        if total < rule.min_requests or ready_instances < 1:
            return tree
        hot_above = rule.hot_share_factor / ready_instances * total
        cold_below = rule.cold_share_factor / ready_instances * total
        hot = {
            prefix: depth
            for prefix, depth in self._prefixes_of_at_least(min(hot_above, cold_below))
            if (count := self._counts[prefix]) > hot_above or (prefix in tree.hot and count >= cold_below)
        }
        return tree if hot == tree.hot else HotnessTree(hot)

    def _prefixes_of_at_least(self, least: float) -> Iterable[tuple[int, int]]:
        """Prefixes with their depth, among them all that are counted ``least`` times or more."""
        if least >= FREQUENT_COUNT:
            return self._frequent.items()
        return ((prefix, depth) for _, head in self._entries for depth, prefix in enumerate(head, 1))
