"""What a pool knows beyond a candidate pair: the instance that was last given a prefix, and the least loaded ones.

Both answer in a time that does not grow with the number of instances.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from scheduling.chain import Chain, sample_depths

LEAST_LOADED = 2
"""Least loaded instances that a placement weighs beyond its candidates."""


class PrefixIndex:
    """The last instance of sampled prefixes, in two generations. A new one that is full takes the old one's place, and
    samples that were in the old one alone are dropped."""

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._new: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def stamp(self, chain: Chain, instance_id: str) -> None:
        """The chain was placed on the instance."""
        for depth in sample_depths(chain):
            self._new[chain.hashes[depth - 1]] = instance_id
        if len(self._new) > self._max_samples:
            self._new, self._old = {}, self._new

    def find(self, chain: Chain) -> tuple[str | None, int]:
        """The holder of the deepest known sample, and its depth in blocks; (None, 0) where none is known."""
        for depth in reversed(sample_depths(chain)):
            sample = chain.hashes[depth - 1]
            if (holder := self._new.get(sample) or self._old.get(sample)) is not None:
                return holder, depth
        return None, 0

    def generations(self) -> tuple[dict[int, str], dict[int, str]]:
        """Copies of the new and the old generation."""
        return dict(self._new), dict(self._old)


class Ranking:
    """Instances that take requests, by their load in seconds; kept sorted."""

    def __init__(self) -> None:
        self._ranks: list[tuple[float, str]] = []
        self._scores: dict[str, float] = {}

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._scores

    def put(self, instance_id: str, score: float | None) -> None:
        """Rank the instance; None takes it out."""
        former = self._scores.pop(instance_id, None)
        if former is not None:
            del self._ranks[bisect_left(self._ranks, (former, instance_id))]
        if score is not None:
            self._scores[instance_id] = score
            insort(self._ranks, (score, instance_id))

    def first(self) -> tuple[tuple[str, float], ...]:
        """The few least loaded with their scores, least first."""
        return tuple((instance_id, score) for score, instance_id in self._ranks[:LEAST_LOADED])

    def all(self) -> dict[str, float]:
        """Every ranked instance's score."""
        return dict(self._scores)
