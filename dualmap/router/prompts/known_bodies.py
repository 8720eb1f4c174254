"""What was learned of the conversations of former bodies, kept under hashes of their bytes.

An agent's turn sends its whole conversation again, which begins byte for byte like that of the turn before. So what a
replica has learned of a conversation up to a message's end is kept at a *mark*: the chain of its blocks, the bytes that
fill no block, counts of its parts. The bytes of a new body's list of messages are hashed up to a mark at the speed of
memory; where the hash is known, reading continues behind the mark. This is exact:

- The bytes between the list's first item and the mark are those that were read (``api_bodies.listed_json`` says why
  they mean the same in another body). Hashes have 128 bits, and begin with a number that this process drew, so that no
  client can make two lists with one hash.
- Messages are rendered one after the other, and independently. What stands before them in a prompt (tools, a system
  prompt of its own, arguments of the template) is rendered from each body, and a mark holds for equal bytes alone.
- Marks lie only where what follows changes nothing before it: see ``router.prompts.prompt``.

The hash also begins with the tenant and the path. So a body shows by nothing, not even by the time that it takes,
whether another tenant has sent its beginning. Clients without a tenant are one in this, as they are one in everything.

Lists are found by the hashes of their first 0, ``GRID_BYTES``, … bytes, each a *point*, which leads to the last mark
before it and to those up to the next point. Marks in the middle of a list are about as far apart as points: from these
goes on who has changed the end of a conversation. A list that goes on behind the last mark of another takes its place:
its *run* grows. The run that was used least recently is dropped when all take more than ``max_bytes``.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from dualmap.api_bodies.listed_json import STRETCH_BYTES, JsonBound
from dualmap.scheduling.prompts.blocks import ContinuedText, KnownText, Piece, size_of
from dualmap.scheduling.values import value

GRID_BYTES: Final = STRETCH_BYTES
_MAX_TAILS: Final = 8
"""Marks between two points; one of each conversation that branches off there."""
_MAX_FOUND: Final = 3
"""Marks of one list that are tried."""
_HASH_BYTES: Final = 8
_POINT_BYTES: Final = 420
_MARK_BYTES: Final = 460
_RUN_BYTES: Final = 1000
"""Memory of these, roughly, with their places in tables."""

_SEED: Final = secrets.randbits(64)


@value
class Counted:
    """The parts of a list up to a mark."""

    items: int = 0
    messages: int = 0
    """Messages of the chat that the items are."""
    parts: int = 0
    """Content parts."""
    bound: JsonBound = JsonBound()

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            self.items + other.items,
            self.messages + other.messages,
            self.parts + other.parts,
            self.bound + other.bound,
        )


@value
class ChatShape:
    """The properties of a chat that decide how it continues."""

    role: str
    """The role of the last message."""
    traits: frozenset[str] = frozenset()
    """Kinds of its messages that templates may treat by their place, see ``router.tokens.split_chats``."""


@value
class ChatEnd:
    """The end of a chat that is known by its tokens."""

    shape: ChatShape
    kind: frozenset[str]
    """The kinds of its messages, see ``router.tokens.request_kind``."""


@value
class KnownChat:
    """The beginning of a chat that is known by its tokens."""

    end: ChatEnd
    size: int
    """Bytes of the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The state of reading behind an item of a list."""

    end: int
    """Bytes of the list up to there."""
    digest: int
    counted: Counted
    blocks: int
    """Full blocks of the prompt up to there: the first of the run's hashes."""
    rest: bytes
    """Bytes of the prompt that follow the last full block."""
    run: Run
    chat: KnownChat | None = None
    """The blocks, and the rest, are those of its tokens; None: those of its bytes."""

    @property
    def known(self) -> KnownText:
        """The prompt up to there."""
        return KnownText(self.run.seed, self.run.block_bytes, self.run.hashes, self.blocks, self.rest)

    @property
    def size(self) -> int:
        """Bytes of the prompt up to there."""
        return self.known.size if self.chat is None else self.chat.size

    def continued(self, pieces: Sequence[Piece]) -> ContinuedText | ContinuedChat:
        """The prompt that has these pieces behind it."""
        if self.chat is None:
            return ContinuedText(self.known, pieces)
        return ContinuedChat(self.known, self.chat, pieces)


@value
class ContinuedChat:
    """A chat whose beginning is known by its tokens."""

    begins: KnownText
    """The ids of the tokens, 32 bits each."""
    known: KnownChat
    pieces: Sequence[Piece]
    """The rest of the prompt."""

    @property
    def size(self) -> int:
        """Bytes of the prompt."""
        return self.known.size + size_of(self.pieces)


@dataclass(slots=True, eq=False)
class Run:
    """The prompt of a conversation, as far as it is known."""

    seed: int
    block_bytes: int
    head: int
    """Hash of what the prompt has before the list."""
    behind: int
    """Bytes of the last body behind its list."""
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    marks: list[Mark] = field(default_factory=list)
    points: list[int] = field(default_factory=list)
    """Points that lead here."""

    @property
    def memory_bytes(self) -> int:
        marks = sum(_MARK_BYTES + len(mark.rest) for mark in self.marks)
        return _RUN_BYTES + _HASH_BYTES * len(self.hashes) + marks + _POINT_BYTES * len(self.points)


@dataclass(slots=True)
class _Point:
    mark: Mark | None = None
    """The last one before the point."""
    tails: list[Mark] = field(default_factory=list)
    """Those from here up to the next point."""


@value
class NewMark:
    """A place behind an item at which a mark is to be set."""

    end: int
    """Bytes of the list."""
    size: int
    """Bytes of the prompt."""
    counted: Counted


class ListHashes:
    """Hashes of the beginnings of one body's list."""

    def __init__(self, body: bytes, begin: int, tenant: str, path: str) -> None:
        """``begin`` is the place of the list's first item."""
        whose = xxhash.xxh3_64_intdigest(f"{path}\n{tenant}".encode("utf-8", "surrogatepass"), _SEED)
        self._list = memoryview(body)[begin:]
        running = xxhash.xxh3_128(seed=whose)
        self._running = running_at = [running.copy()]
        self.grid = grid = [whose]
        """Those of its first 0, ``GRID_BYTES``, … bytes."""
        listed, update = self._list, running.update
        for end in range(GRID_BYTES, len(listed) + 1, GRID_BYTES):
            update(listed[end - GRID_BYTES : end])
            running_at.append(running.copy())
            grid.append(running.intdigest())

    def __len__(self) -> int:
        """Bytes from the list's first item to the end of the body."""
        return len(self._list)

    def of(self, end: int) -> int:
        """The hash of so many bytes."""
        place = end // GRID_BYTES
        running = self._running[place].copy()
        running.update(self._list[place * GRID_BYTES : end])
        return running.intdigest()


@value
class Listed:
    """A list that was read, and what is around it."""

    hashes: ListHashes
    head: int
    """Hash of what the prompt has before it."""
    behind: int
    """Bytes of the body behind it."""


class KnownBodies:
    """Runs, bounded by memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._points: dict[int, _Point] = {}
        self._used: OrderedDict[int, tuple[Run, int]] = OrderedDict()
        """Runs by identity, with the memory that was counted; least recently used first."""
        self.memory_bytes = 0

    def __len__(self) -> int:
        return len(self._used)

    def find(self, hashes: ListHashes) -> Iterator[Mark]:
        """Marks whose bytes the list has, the longest first."""
        left, longest = _MAX_FOUND, len(hashes)
        for place in range(len(hashes.grid) - 1, -1, -1):
            point = self._points.get(hashes.grid[place])
            if point is None:
                continue
            for mark in sorted(point.tails, key=_end, reverse=True):
                if mark.end <= longest and hashes.of(mark.end) == mark.digest:
                    longest = mark.end - 1
                    yield mark
                    left -= 1
            before = point.mark
            if before is not None and before.end <= longest:
                longest = before.end - 1
                yield before
                left -= 1
            if left <= 0:
                return

    def use(self, mark: Mark) -> None:
        """Note that reading went on from the mark."""
        key = id(mark.run)
        if key in self._used:
            self._used.move_to_end(key)

    def keep(self, listed: Listed, start: Mark | None, new: Sequence[NewMark], text: HashedText) -> None:
        """Keep the new marks of a list, in order, all behind ``start``."""
        hashes, tokens = listed.hashes, text.tokens
        if tokens is not None:  # they are known behind the last item, where no mark may lie
            new = [mark for mark in new[-1:] if mark.end == len(hashes) - listed.behind]
        sizes = [mark.size if tokens is None else tokens.bytes for mark in new]
        if not new or sizes[-1] < text.block_bytes:
            return
        skipped = sum(size < text.block_bytes for size in sizes)
        new, sizes = new[skipped:], sizes[skipped:]
        run = self._run_for(listed, start, text)
        first = 0 if start is None else start.blocks
        run.hashes.extend(text.hashes[first : sizes[-1] // text.block_bytes])
        place = 0 if start is None else start.end // GRID_BYTES + 1
        if run.marks:
            self._drop_former_end(run)
        last = run.marks[-1] if run.marks else None
        for each, size in zip(new, sizes, strict=True):
            place = self._lead(hashes.grid, place, -(-each.end // GRID_BYTES), last, run)
            blocks = size // text.block_bytes
            rest = text.data[blocks * text.block_bytes - text.before : size - text.before]
            chat = None if tokens is None else KnownChat(tokens.end, each.size)
            last = Mark(each.end, hashes.of(each.end), each.counted, blocks, rest, run, chat)
            self._add_tail(hashes.grid[each.end // GRID_BYTES], last)
            run.marks.append(last)
        self._count(run)

    def forget(self, run: Run) -> None:
        """Drop a run, of which a request has found that it is of no use."""
        _, counted = self._used.pop(id(run), (run, 0))
        self.memory_bytes -= counted
        self._let_go(run)

    def _run_for(self, listed: Listed, start: Mark | None, text: HashedText) -> Run:
        """The run to which marks behind ``start`` are added: its own, if they follow its last one, or a new one."""
        if start is None:
            return Run(text.seed, text.block_bytes, listed.head, listed.behind)
        run = start.run
        if run.marks[-1] is start and id(run) in self._used:
            run.behind = listed.behind
            return run
        return Run(text.seed, text.block_bytes, listed.head, listed.behind, run.hashes[: start.blocks])

    def _drop_former_end(self, run: Run) -> None:
        """Drop the mark at the end of a run that grows, unless it is far from the one before it."""
        last, former = run.marks[-1], run.marks[-2].end if len(run.marks) > 1 else 0
        if last.end - former >= GRID_BYTES:
            return
        run.marks.pop()
        for point in filter(None, map(self._points.get, run.points)):
            if last in point.tails:
                point.tails.remove(last)

    def _lead(self, grid: Sequence[int], place: int, until: int, mark: Mark | None, run: Run) -> int:
        """Let the points from ``place`` to ``until`` lead to a mark; returns the first one behind them."""
        if mark is not None:
            for key in grid[place:until]:
                self._point(key, run).mark = mark
        return max(place, until)

    def _add_tail(self, key: int, mark: Mark) -> None:
        tails = self._point(key, mark.run).tails
        tails[:] = [kept for kept in tails if kept.digest != mark.digest][1 - _MAX_TAILS :]
        tails.append(mark)

    def _point(self, key: int, run: Run) -> _Point:
        point = self._points.get(key)
        if point is None:
            point = self._points[key] = _Point()
        if key not in run.points:
            run.points.append(key)
        return point

    def _count(self, run: Run) -> None:
        _, counted = self._used.pop(id(run), (run, 0))
        size_bytes = run.memory_bytes
        self._used[id(run)] = run, size_bytes
        self.memory_bytes += size_bytes - counted
        while self.memory_bytes > self._max_bytes and self._used:
            _, (oldest, counted) = self._used.popitem(last=False)
            self.memory_bytes -= counted
            self._let_go(oldest)

    def _let_go(self, run: Run) -> None:
        for key in run.points:
            point = self._points.get(key)
            if point is None:
                continue
            point.tails = [kept for kept in point.tails if kept.run is not run]
            if point.mark is not None and point.mark.run is run:
                point.mark = None
            if point.mark is None and not point.tails:
                del self._points[key]
        run.points.clear()


@value
class HashedText:
    """The blocks of a prompt, and its bytes behind the first ones."""

    seed: int
    block_bytes: int
    hashes: Sequence[int]
    before: int
    """Bytes of the prompt before ``data``."""
    data: bytes
    tokens: HashedTokens | None = None
    """The blocks, and the bytes, are those of its tokens; None: those of its text."""


@value
class HashedTokens:
    """The place in the tokens of a chat from which another one with the same messages continues."""

    bytes: int
    """Bytes of the tokens up to there, 4 for each."""
    end: ChatEnd


def _end(mark: Mark) -> int:
    return mark.end
