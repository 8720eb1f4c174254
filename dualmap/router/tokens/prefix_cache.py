"""Chains of tokenized prompts, kept by the text that they were made from: a longer text starts from the longest known
one.

A text may be cut only where its tokens are cut too. That is certain before a special token (``<|im_start|>``): a
tokenizer takes these out of a text before it does anything else, so what stands before one and what follows are
tokenized independently. These places are the *boundaries*. Chat templates put one around every message, so that a
conversation's next turn has all but its own words before a known boundary.

Texts are found again by hashes of their prefixes: one every ``GRID_BYTES``, each a *point*, and from the last of these
up to a boundary, a *tail*.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from dualmap.scheduling.values import value

GRID_BYTES: Final = 2048
_MAX_TAILS: Final = 8
"""Boundaries kept between two points of the grid; one of each conversation that branches off there."""
_HASH_BYTES: Final = 8
_POINT_BYTES: Final = 400
"""Memory of a point, roughly."""

_digest = xxhash.xxh3_64_intdigest


@dataclass(slots=True, eq=False)
class Tokenized:
    """Block hashes of one tokenized text. Longer texts that begin alike share the numbers."""

    hashes: array[int] = field(default_factory=lambda: array("Q"))
    points: list[int] = field(default_factory=list)
    """Points of the cache that lead here."""

    @property
    def memory_bytes(self) -> int:
        return _HASH_BYTES * len(self.hashes) + _POINT_BYTES * len(self.points)


@value
class Known:
    """The state of a tokenized text at a boundary: from here on the rest can be tokenized on its own."""

    end: int
    """Bytes of text up to the boundary."""
    blocks: int
    """Full blocks up to there: the first of ``tokenized.hashes``."""
    rest: bytes
    """Token ids that follow the last full block, 32 bits each."""
    tokenized: Tokenized


@dataclass(slots=True)
class _Point:
    known: Known | None = None
    """The last boundary before the point."""
    tails: list[tuple[int, int, Known]] = field(default_factory=list)
    """End, hash and state of boundaries behind the point."""


class PrefixCache:
    """A cache of tokenized texts, bounded by memory; the text that was not used for longest goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._points: dict[int, _Point] = {}
        self._used: OrderedDict[int, tuple[Tokenized, int]] = OrderedDict()
        """Texts by identity, with the memory that was counted; least recently used first."""

    def __len__(self) -> int:
        return len(self._used)

    @property
    def memory_bytes(self) -> int:
        return self._bytes

    def find(self, grid: Sequence[int], text: bytes) -> Known | None:
        """The longest known boundary in ``text``, whose ``prefix_grid`` is ``grid``."""
        for place in range(len(grid) - 1, -1, -1):
            point = self._points.get(grid[place])
            if point is None:
                continue
            found = point.known
            for end, tail, known in point.tails:
                longer = found is None or end > found.end
                if longer and end <= len(text) and _digest(text[place * GRID_BYTES : end], grid[place]) == tail:
                    found = known
            if found is not None:
                self._used.move_to_end(id(found.tokenized))
                return found
        return None

    def add(self, grid: Sequence[int], text: bytes, start: Known | None, boundaries: Sequence[Known]) -> None:
        """Keep the new boundaries of ``text``, in order, all of one tokenized text and behind ``start``."""
        if not boundaries:
            return
        tokenized = boundaries[0].tokenized
        last, place = start, (start.end if start else 0) // GRID_BYTES + 1
        for known in boundaries:
            place = self._lead(grid, place, -(-known.end // GRID_BYTES), last, tokenized)
            at = known.end // GRID_BYTES
            tails = self._point(grid[at], tokenized).tails
            tail = _digest(text[at * GRID_BYTES : known.end], grid[at])
            tails[:] = [kept for kept in tails if kept[:2] != (known.end, tail)][1 - _MAX_TAILS :]
            tails.append((known.end, tail, known))
            last = known
        self._lead(grid, place, len(grid), last, tokenized)
        self._count(tokenized)

    def _lead(self, grid: Sequence[int], place: int, until: int, known: Known | None, tokenized: Tokenized) -> int:
        """Let the points from ``place`` to ``until`` lead to a boundary; returns the first one behind them."""
        if known is not None:
            for key in grid[place:until]:
                self._point(key, tokenized).known = known
        return max(place, until)

    def _point(self, key: int, tokenized: Tokenized) -> _Point:
        point = self._points.get(key)
        if point is None:
            point = self._points[key] = _Point()
        tokenized.points.append(key)
        return point

    def _count(self, tokenized: Tokenized) -> None:
        _, counted = self._used.pop(id(tokenized), (None, 0))
        self._used[id(tokenized)] = tokenized, tokenized.memory_bytes
        self._bytes += tokenized.memory_bytes - counted
        while self._bytes > self._max_bytes and self._used:
            _, (oldest, counted) = self._used.popitem(last=False)
            self._bytes -= counted
            self._forget(oldest)

    def _forget(self, tokenized: Tokenized) -> None:
        for key in tokenized.points:
            point = self._points.get(key)
            if point is None:
                continue
            point.tails = [kept for kept in point.tails if kept[2].tokenized is not tokenized]
            if point.known is not None and point.known.tokenized is tokenized:
                point.known = None
            if point.known is None and not point.tails:
                del self._points[key]
        tokenized.points.clear()


def prefix_grid(text: bytes, seed: int) -> list[int]:
    """Hashes of the text's prefixes of 0, ``GRID_BYTES``, … bytes; ``seed`` stands for what else must be equal."""
    grid = [seed]
    for end in range(GRID_BYTES, len(text) + 1, GRID_BYTES):
        seed = _digest(text[end - GRID_BYTES : end], seed)
        grid.append(seed)
    return grid
