"""A sorted set of Redis: members by score, those of one score in their own order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

_WHOLE_BELOW = 1e17
"""Whole numbers from here on are written with an exponent."""


class SortedSet:
    """Members and scores, kept sorted."""

    __slots__ = ("_order", "_scores", "score")

    def __init__(self) -> None:
        self._scores: dict[bytes, float] = {}
        self._order: list[tuple[float, bytes]] = []
        self.score: Final[Callable[[bytes], float | None]] = self._scores.get
        """The score of a member, None where it is not there: read for each block of a prompt."""

    def __len__(self) -> int:
        return len(self._order)

    def put(self, member: bytes, score: float) -> None:
        former = self._scores.get(member)
        if former is not None:
            del self._order[bisect_left(self._order, (former, member))]
        self._scores[member] = score
        insort(self._order, (score, member))

    def remove(self, member: bytes) -> bool:
        """Whether it was there."""
        score = self._scores.pop(member, None)
        if score is None:
            return False
        del self._order[bisect_left(self._order, (score, member))]
        return True

    def rank(self, member: bytes) -> int | None:
        """How many are before it."""
        score = self._scores.get(member)
        return None if score is None else bisect_left(self._order, (score, member))

    def below(self, score: float) -> int:
        """How many have a lower one."""
        return bisect_left(self._order, (score, b""))

    def ranked(self, ranks: slice) -> Sequence[tuple[float, bytes]]:
        return self._order[ranks]

    def drop_first(self, count: int) -> int:
        """Remove those of the lowest scores; returns how many they were."""
        dropped = self._order[:count]
        del self._order[:count]
        for _, member in dropped:
            del self._scores[member]
        return len(dropped)


def flat(entries: Iterable[tuple[float, bytes]]) -> Iterator[bytes]:
    """Each member and its score, as Redis replies them."""
    for score, member in entries:
        yield member
        yield number(score)


def number(each: float) -> bytes:
    """A number as Redis writes it."""
    return b"%d" % each if each % 1 == 0 and abs(each) < _WHOLE_BELOW else repr(float(each)).encode()
