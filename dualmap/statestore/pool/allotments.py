"""The parts of a pool in budgets that are divided among pools, see ``scheduling.tenants.allotments``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dualmap.scheduling.tenants.allotments import in_force
from dualmap.scheduling.tenants.budgets import MINUTE_S, Limit, entry_of
from dualmap.statestore.pool.calls import Argument
from dualmap.statestore.pool.changes import Changes
from dualmap.statestore.pool.codec import budget_used, pairs_from
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies, count_from

_COUNTER: Final = "*"
_REFUSED: Final = -1
_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """A pool wants more of a budget."""

    needs: int
    """The cost of a request that did not fit; 0: there is little left."""
    amount: int
    """The limit."""
    pools: tuple[str, ...]
    """The pools of the tenant, in order."""

    @classmethod
    def parse(cls, text: bytes) -> Wanted:
        """Raises ValueError if the text is malformed."""
        needs, amount, pools = text.decode().split(" ")
        return cls(count_from(needs.encode()), max(1, count_from(amount.encode())), tuple(pools.split(",")))


@dataclass(frozen=True, slots=True)
class Entered:
    """The entry of a divided budget in a pool."""

    part: int
    of: int
    """The amount that this is a part of."""
    stamp: int


@dataclass(frozen=True, slots=True)
class Allotted:
    """A pool's part of a budget, and its use."""

    part: int
    stamp: int
    """The number of the change by which it got that; 0: nothing is entered."""
    used: int
    wanted: Wanted | None = None


@dataclass(frozen=True, slots=True)
class Allotment:
    """A change of a pool's part of a budget."""

    budget: str
    amount: int
    begins_with: int
    """The part of the pool where none is entered."""
    stamp: int
    part: int
    rest: int = 0
    """The amount that is unused in other pools."""


def entered_from(text: bytes | None) -> Entered | None:
    """The entry that the scripts wrote (``statestore/lua/shared/allotments.lua``); None where none can be read."""
    words = (text or b"").split()
    if len(words) != _WORDS or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return Entered(int(words[0]), int(words[1]), int(words[2]))


def leak_per_s_of(limit: Limit, text: bytes | None) -> float:
    """The amount of the limit that leaks each second in a pool with this entry."""
    entered = entered_from(text)
    return limit.leak_per_s if entered is None else limit.leak_per_s * entered.part / entered.of


class Allotments(Changes):
    """The leader's calls about a pool's parts. Draws read them, and say what is wanted."""

    @checks_replies
    async def changes(self) -> int:
        """A number that grows with every change; it goes back where the store lost some."""
        return count_from(await self._calls.command("HGET", self._keys.budgets_allotted, _COUNTER) or b"0")

    @checks_replies
    async def wanted(self) -> Mapping[str, Wanted]:
        """The budgets of which more is wanted, by name."""
        found = {}
        for name, text in pairs_from(await self._calls.command("HGETALL", self._keys.budgets_wanted)).items():
            with contextlib.suppress(*UNREADABLE):
                found[name.decode()] = Wanted.parse(text)
        return found

    @checks_replies
    async def of(self, budget: str, amount: int, begins_with: int) -> Allotted:
        """The part of an amount that the pool has; ``begins_with`` where nothing is entered."""
        keys, (book, kind) = self._keys, entry_of(budget)
        read = [("HGET", keys.budgets_allotted, budget), ("HGET", keys.books, book)]
        text, spent, wish = await self._calls.together([*read, ("HGET", keys.budgets_wanted, budget)])
        entered = entered_from(text)
        part = begins_with if entered is None else in_force(entered.part, entered.of, amount)
        used = math.ceil(budget_used(spent, kind, await self._calls.now_ms(), part / MINUTE_S))
        wanted = None
        if wish is not None:
            with contextlib.suppress(*UNREADABLE):
                wanted = Wanted.parse(wish)
        return Allotted(part, 0 if entered is None else entered.stamp, used, wanted)

    @checks_replies
    async def entered(self, budgets: Sequence[str]) -> dict[str, Entered]:
        """The entries of budgets, by name."""
        if not budgets:
            return {}
        texts = await self._calls.command("HMGET", self._keys.budgets_allotted, *budgets)
        found = zip(budgets, map(entered_from, texts), strict=True)
        return {budget: each for budget, each in found if each is not None}

    @checks_replies
    async def allot(self, change: Allotment) -> int | None:
        """Make a change, and return the part that the pool has then: more than asked where it uses more. None where a
        change with this stamp or a later one was made. A repetition changes nothing."""
        words: list[Argument] = [change.budget, *entry_of(change.budget), change.amount]
        words += [change.begins_with, change.stamp, change.part, change.rest]
        (part,) = await self._run("allot_budgets", *words)
        return None if part == _REFUSED else part
