"""A Redis server within this process: the commands that pools use, each with the meaning that Redis gives it.

Product code, not a test double: ``memory://``, a replica whose store is away and the simulator keep their books with
the scripts of production. What is kept are bytes, as at a server; there is no expiry, and no error but a missing key's.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from dualmap.statestore.errors import StoreError
from dualmap.statestore.memory.lua import LuaFunctions
from dualmap.statestore.memory.sorted_set import SortedSet, flat, number

Word = bytes | int | float
"""A word of a command; scripts send numbers as well."""

_NOTHING: Mapping[bytes, bytes] = {}
_EMPTY = SortedSet()


class MemoryServer:
    """Keys by name. Each method ``do_…`` is a command."""

    def __init__(self) -> None:
        self.contents: dict[bytes, Any] = {}
        """Values by key. An empty one counts as missing."""
        self._listeners: dict[bytes, list[Callable[[bytes], None]]] = {}
        self._published: deque[tuple[Callable[[bytes], None], bytes]] = deque()
        self._awaited: dict[bytes, asyncio.Event] = {}
        names = [name.removeprefix("do_") for name in dir(self) if name.startswith("do_")]
        self._commands = {name.upper().encode(): getattr(self, f"do_{name}") for name in names}
        self._lua = LuaFunctions(self._commands)

    def run(self, name: bytes, *words: Word) -> Any:
        """The reply: bytes, an integer, None or a list of these.

        Raises:
            KeyError: no pool uses such a command.
        """
        return self._commands[name](*words)

    def load_functions(self, library: str) -> None:
        """Take in the functions of a library, whose names no other library has."""
        self._lua.load(library)

    def run_function(self, name: str, key: bytes, arguments: Sequence[bytes]) -> Any:
        """The reply of a function.

        Raises:
            StoreError: it replied an error.
        """
        return self._lua.call(name, key, arguments)

    def listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        self._listeners.setdefault(channel, []).append(deliver)

    def deliver(self) -> None:
        """Hand on what was published."""
        while self._published:
            deliver, message = self._published.popleft()
            deliver(message)

    async def added(self, key: bytes) -> None:
        """Wait until something is added to a sorted set."""
        await self._awaited.setdefault(key, asyncio.Event()).wait()

    # keys ------------------------------------------------------------------------------------------------
    def do_exists(self, *keys: bytes) -> int:
        return sum(map(bool, map(self.contents.get, keys)))

    def do_del(self, *keys: bytes) -> int:
        return sum(bool(self.contents.pop(key, None)) for key in keys)

    do_unlink = do_del

    def do_rename(self, key: bytes, new: bytes) -> bytes:
        if key not in self.contents:
            raise StoreError(f"no such key: {key!r}")
        self.contents[new] = self.contents.pop(key)
        return b"OK"

    def do_type(self, key: bytes) -> bytes:
        kinds = {dict: b"hash", SortedSet: b"zset", list: b"list", deque: b"stream"}
        kept = self.contents.get(key)
        return kinds[type(kept)] if kept else b"none"

    def do_publish(self, channel: bytes, message: bytes) -> int:
        listeners = self._listeners.get(channel, ())
        self._published.extend((deliver, message) for deliver in listeners)
        return len(listeners)

    # hashes ----------------------------------------------------------------------------------------------
    def _hash(self, key: bytes) -> Mapping[bytes, bytes]:
        found: Mapping[bytes, bytes] = self.contents.get(key, _NOTHING)
        return found

    def do_hget(self, key: bytes, name: bytes) -> bytes | None:
        return self._hash(key).get(name)

    def do_hmget(self, key: bytes, *names: bytes) -> list[bytes | None]:
        return list(map(self._hash(key).get, names))

    def do_hgetall(self, key: bytes) -> list[bytes]:
        return [word for pair in self._hash(key).items() for word in pair]

    def do_hscan(self, key: bytes, _cursor: bytes, _count: bytes, _most: Word) -> list[Any]:
        """All entries at once."""
        return [b"0", self.do_hgetall(key)]

    def do_hkeys(self, key: bytes) -> list[bytes]:
        return [*self._hash(key)]

    def do_hlen(self, key: bytes) -> int:
        return len(self._hash(key))

    def do_hset(self, key: bytes, *pairs: Word) -> int:
        kept = self.contents.setdefault(key, {})
        before = len(kept)
        kept.update(zip(pairs[::2], map(_text, pairs[1::2]), strict=True))
        return len(kept) - before

    def do_hsetnx(self, key: bytes, name: bytes, each: Word) -> int:
        return 0 if name in self._hash(key) else self.do_hset(key, name, each)

    def do_hdel(self, key: bytes, *names: bytes) -> int:
        kept = self.contents.get(key, {})
        return sum(kept.pop(name, None) is not None for name in names)

    def do_hincrby(self, key: bytes, name: bytes, growth: Word) -> int:
        grown = int(self.do_hget(key, name) or 0) + int(growth)
        self.do_hset(key, name, grown)
        return grown

    # sorted sets -----------------------------------------------------------------------------------------
    def _sorted(self, key: bytes) -> SortedSet:
        found: SortedSet = self.contents.get(key, _EMPTY)
        return found

    def do_zadd(self, key: bytes, *words: Any) -> int:
        option = words[0] if words[0] in (b"NX", b"GT") else b""
        kept: SortedSet = self.contents.setdefault(key, SortedSet())
        before = len(kept)
        first = 1 if option else 0
        score_of, put = kept.score, kept.put
        for score, member in zip(words[first::2], words[first + 1 :: 2], strict=True):
            new, former = float(score), score_of(member)
            if former is None or (option != b"NX" and (option != b"GT" or new > former)):
                put(member, new)
        if key in self._awaited:
            self._awaited.pop(key).set()
        return len(kept) - before

    def do_zrem(self, key: bytes, *members: bytes) -> int:
        return sum(map(self._sorted(key).remove, members))

    def do_zcard(self, key: bytes) -> int:
        return len(self._sorted(key))

    def do_zscore(self, key: bytes, member: bytes) -> bytes | None:
        kept: SortedSet = self.contents.get(key, _EMPTY)
        score = kept.score(member)
        return None if score is None else number(score)

    def do_zmscore(self, key: bytes, *members: bytes) -> list[bytes | None]:
        return [self.do_zscore(key, member) for member in members]

    def do_zrevrank(self, key: bytes, member: bytes) -> int | None:
        rank = self._sorted(key).rank(member)
        return None if rank is None else len(self._sorted(key)) - 1 - rank

    def do_zcount(self, key: bytes, least: Word, most: bytes) -> int:
        """Count members from the score ``least`` up to ``most``."""
        return self._up_to(key, most) - self._sorted(key).below(float(least))

    def _up_to(self, key: bytes, bound: bytes) -> int:
        """Members up to a score, or below '(SCORE'."""
        below = float(bound[1:]) if bound.startswith(b"(") else math.nextafter(float(bound), math.inf)
        return self._sorted(key).below(below)

    def do_zrange(self, key: bytes, first: Word, last: Word, *with_scores: bytes) -> list[bytes]:
        entries = self._sorted(key).ranked(_slice(first, last))
        return [*flat(entries)] if with_scores else [member for _, member in entries]

    def do_zrangebyscore(self, key: bytes, least: bytes, most: bytes, *options: Word) -> list[bytes]:
        """Members of a score from ``least`` on and up to ``most``, at most so many."""
        first = self._sorted(key).below(float(least))
        entries = self._sorted(key).ranked(slice(first, min(self._up_to(key, most), first + int(options[-1]))))
        return [*flat(entries)] if options[0] == b"WITHSCORES" else [member for _, member in entries]

    def do_zrevrange(self, key: bytes, first: Word, last: Word) -> list[bytes]:
        ranks = slice(-1 - int(first), -2 - int(last), -1)
        return [member for _, member in self._sorted(key).ranked(ranks)]

    def do_zremrangebyrank(self, key: bytes, _first: Word, last: Word) -> int:
        """Drop members from the first rank up to ``last``, which counts from the end where it is below 0."""
        kept = self._sorted(key)
        return kept.drop_first(max(0, int(last) + 1 + (len(kept) if int(last) < 0 else 0)))

    def do_zremrangebyscore(self, key: bytes, _least: bytes, most: bytes) -> int:
        """Drop members from the lowest score up to ``most``."""
        return self._sorted(key).drop_first(self._up_to(key, most))

    def do_zpopmin(self, key: bytes, count: Word = 1) -> list[bytes]:
        kept = self._sorted(key)
        popped = [*flat(kept.ranked(slice(int(count))))]
        kept.drop_first(int(count))
        return popped

    # lists -----------------------------------------------------------------------------------------------
    def do_lpush(self, key: bytes, entry: bytes) -> int:
        self.contents.setdefault(key, []).insert(0, entry)
        return len(self.contents[key])

    def do_rpush(self, key: bytes, entry: bytes) -> int:
        self.contents.setdefault(key, []).append(entry)
        return len(self.contents[key])

    def do_ltrim(self, key: bytes, first: Word, last: Word) -> bytes:
        self.contents[key] = self.do_lrange(key, first, last)
        return b"OK"

    def do_lrange(self, key: bytes, first: Word, last: Word) -> list[bytes]:
        kept: Sequence[bytes] = self.contents.get(key, ())
        return [*kept[_slice(first, last)]]

    # streams ---------------------------------------------------------------------------------------------
    def do_xadd(self, key: bytes, _maxlen: bytes, _about: bytes, most: Word, _id: bytes, *flat: Word) -> bytes:
        """Entries are numbered, from 1."""
        log = self.contents.setdefault(key, deque(maxlen=int(most)))
        name = b"%d-0" % (_entry_number(log[-1][0]) + 1 if log else 1)
        log.append((name, [*map(_text, flat)]))
        return name

    def do_xrange(self, key: bytes, after: bytes, _end: bytes, _count: bytes, limit: Word) -> list[Any]:
        log = self.contents.get(key, ())
        skip = max(0, _entry_number(after[1:]) + 1 - _entry_number(log[0][0])) if log else 0
        return [*islice(log, skip, skip + int(limit))]


def _entry_number(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _slice(first: Word, last: Word) -> slice:
    """Python's of a range of Redis, whose last one is in it."""
    return slice(int(first), None if int(last) == -1 else int(last) + 1)


def _text(word: Word) -> bytes:
    return word if isinstance(word, bytes) else number(word)
