"""Books of tenants as schema 1 kept them: a text for each budget. Who enters a pool packs them
(``statestore/lua/shared/books.lua``), so that no limit forgets what was used of it. Work is forgotten: it decays in
seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import date
from typing import Final

from dualmap.scheduling.tenants.budgets import KINDS, Period, entry_of
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import BUDGET, WORK, pairs_from
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies

_TOGETHER: Final = 500
"""Books that are packed in one call."""
_MILLION: Final = 1_000_000
_EPOCH: Final = date(1970, 1, 1).toordinal()


class FormerBooks(Changes):
    """Books of schema 1 that are left in a pool."""

    @checks_replies
    async def pack(self) -> None:
        """Pack all that are left. Other processes may do so at the same time: each budget is packed once."""

        async def pack_some() -> tuple[int, Change]:
            key = self._keys.former_budgets
            found = pairs_from(await self._calls.command("HGETALL", key))
            now_ms, by_book = await self._calls.now_ms(), dict[str, list[tuple[bytes, bytes]]]()
            for name, text in found.items():
                by_book.setdefault(name.decode(errors="replace").rsplit("/", 2)[0], []).append((name, text))
            commands: list[Command] = [] if by_book else [("UNLINK", key, self._keys.former_shares)]
            read: list[tuple[bytes, str, bytes | None]] = []
            for book, budgets in [*by_book.items()][:_TOGETHER]:
                if packed := _packed(budgets, now_ms):
                    commands.append(("HSET", self._keys.books, book, packed))
                commands.append(("HDEL", key, *[name for name, _ in budgets]))
                read += [(key, name.decode(errors="replace"), text) for name, text in budgets[:1]]
            return len(by_book), Change(commands, read)

        while await self._derive(pack_some):
            pass


def _packed(budgets: Sequence[tuple[bytes, bytes]], now_ms: int) -> bytes:
    """The book of budgets, by their names and texts; empty where none can be read."""
    packed = b""
    for name, text in budgets:
        with contextlib.suppress(*UNREADABLE):
            kind = entry_of(name.decode())[1]
            packed += BUDGET.pack(kind, *_entry(KINDS[kind].rpartition("/")[2], text.decode().split()))
    return WORK.pack(0, 0, now_ms, 0, 0, 0, 0) + packed if packed else b""


def _entry(period: str, words: Sequence[str]) -> tuple[float, float]:
    """The amount that was used of a budget, and since when, by the words of its text. Raises ValueError, or the like,
    where they say nothing."""
    if period == Period.IN_FLIGHT:
        return int(words[0]), 0
    used, since = words
    if period == Period.MINUTE:
        return int(used) / _MILLION, int(since)
    year, month, *day = map(int, since.split("-"))
    return int(used), date(year, month, *day).toordinal() - _EPOCH if day else year * 12 + month
