"""What a pool knows beyond a candidate pair: who was last given a prefix, and who has the least to do.

Both answer in a time that does not grow with the number of instances. The Lua twin is ``shared/holders.lua``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container

from scheduling.chain import Chain
from scheduling.prefix_holders import HOLDERS_PER_MARK, mark_depths
from statestore.ledger.account import InstanceAccount

LIGHTEST = 2
"""Least loaded instances that a horizon names."""


class PrefixHolders:
    """The last holders of marked prefixes, in two generations. A new one that is full takes the old one's place, and
    marks that were in the old one alone are dropped."""

    def __init__(self, max_marks: int) -> None:
        self._max_marks = max_marks
        self._new: dict[int, tuple[str, ...]] = {}
        self._old: dict[int, tuple[str, ...]] = {}

    def stamp(self, chain: Chain, instance_id: str) -> None:
        """The instance was given the chain."""
        new, old = self._new, self._old
        for depth in mark_depths(chain):
            mark = chain.hashes[depth - 1]
            held = new.get(mark) or old.get(mark, ())
            if not held or held[0] != instance_id:
                others = [other for other in held if other != instance_id]
                held = (instance_id, *others[: HOLDERS_PER_MARK - 1])
            new[mark] = held
        if len(new) > self._max_marks:
            self._new, self._old = {}, new

    def find(self, chain: Chain, ready: Container[str]) -> tuple[tuple[str, ...], int]:
        """Ready holders of the deepest known mark, most recent first, and its depth in blocks; ((), 0) if none is."""
        depths = mark_depths(chain)
        if not depths:
            return (), 0
        depth, held = depths[-1], self._held_by(chain, depths[-1])
        # The last mark stands at no multiple of the stride, so shorter prompts say nothing about it: it is asked
        # first. Those before it are closed under prefixes.
        low, high = 0, 0 if held else len(depths) - 1
        while low < high:
            middle = (low + high) // 2
            found = self._held_by(chain, depths[middle])
            if found:
                low, depth, held = middle + 1, depths[middle], found
            else:
                high = middle
        holders = tuple(instance_id for instance_id in held if instance_id in ready)
        return (holders, depth) if holders else ((), 0)

    def _held_by(self, chain: Chain, depth: int) -> tuple[str, ...]:
        mark = chain.hashes[depth - 1]
        return self._new.get(mark) or self._old.get(mark, ())

    def generations(self) -> tuple[dict[int, tuple[str, ...]], dict[int, tuple[str, ...]]]:
        """Copies of the new and the old generation."""
        return dict(self._new), dict(self._old)


class LightestInstances:
    """Ready, scheduled instances by what they have to do: the queueing time of their on-time work, and their KV memory
    in use at ``kv_weight_s`` for a full one; kept sorted."""

    def __init__(self, kv_weight_s: float) -> None:
        self._kv_weight_s = kv_weight_s
        self._ranks: list[tuple[float, str]] = []
        self._scores: dict[str, float] = {}

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._scores

    def put(self, account: InstanceAccount) -> None:
        """Rank the account as it is now; to be called after every change of it."""
        instance_id = account.spec.instance_id
        if not account.takes_requests():
            self.discard(instance_id)
            return
        score = account.work_s(self._kv_weight_s)
        former = self._scores.get(instance_id)
        if former == score:
            return
        if former is not None:
            del self._ranks[bisect_left(self._ranks, (former, instance_id))]
        self._scores[instance_id] = score
        insort(self._ranks, (score, instance_id))

    def discard(self, instance_id: str) -> None:
        former = self._scores.pop(instance_id, None)
        if former is not None:
            del self._ranks[bisect_left(self._ranks, (former, instance_id))]

    def first(self) -> tuple[tuple[str, float], ...]:
        """The few lightest with their scores in seconds, lightest first."""
        return tuple((instance_id, score) for score, instance_id in self._ranks[:LIGHTEST])

    def all(self) -> dict[str, float]:
        """Every ranked instance's score."""
        return dict(self._scores)
