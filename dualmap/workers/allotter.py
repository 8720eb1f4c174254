"""Allotter: moves unused budget of tenants to the pools that want it."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from dualmap.scheduling.tenants.allotments import ROUND_S, divided, equal_part, in_force, within
from dualmap.statestore.errors import StoreError
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.allotments import Allotment, Allotted, Wanted
from dualmap.statestore.tenants.allotment_ledger import AllotmentLedger, LedgerEntry
from dualmap.workers.context import PoolContext

log = logging.getLogger(__name__)

MOST_IN_A_ROUND: Final = 200
"""Budgets that a round divides; the others wait for the next one."""


class Pools(Protocol):
    """The pools of a fleet, and the ledger of what each has of divided budgets."""

    @property
    def allotments(self) -> AllotmentLedger: ...

    def pool(self, name: str) -> PoolStore: ...


class Allotter:
    """Moves unused budget of tenants with several pools to the pools that want it.

    ``scheduling.tenants.allotments`` has the rule, and the order of changes that keeps the sum of all parts within the
    limit.

    The leader of each pool has one, and two of them may divide one budget at once: the ledger takes what the first one
    enters. A pool that cannot be reached keeps what the ledger says that it has.
    """

    name = "allotter"
    interval_s = ROUND_S

    def __init__(self, context: PoolContext, pools: Pools) -> None:
        self._pool = context.pool
        self._pools = pools
        self._metrics = context.metrics
        self._seen = -1
        """The number of the pool's changes at the last round; -1: not known."""
        self._cursor: int | None = 0
        """The cursor at which the comparison of pool and ledger goes on; None: it is over."""
        self._last = ""
        """The last budget of the last round."""

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError where its own pool's store, or the ledger's, is away."""
        changes = await self._pool.allotments.changes()
        if changes < self._seen:
            log.warning("the store lost allotments pool=%s: comparing them with the ledger", self._pool.name)
            self._cursor = 0
        self._seen = changes
        wanted = self._next_of(await self._pool.allotments.wanted())
        if self._cursor is not None:
            wanted = {**await self._beyond_ledger(), **wanted}
        for budget, each in wanted.items():
            if await self._divide(budget, each):
                self._metrics.allotted.labels(self._pool.name).inc()

    def _next_of(self, wanted: Mapping[str, Wanted]) -> Mapping[str, Wanted]:
        """The budgets that this round divides, first those after the last round's, so that all have their turn."""
        names = sorted(wanted)
        first = bisect_right(names, self._last) if len(names) > MOST_IN_A_ROUND else 0
        some = (names[first:] + names[:first])[:MOST_IN_A_ROUND]
        self._last = some[-1] if some else ""
        return {name: wanted[name] for name in some}

    async def _beyond_ledger(self) -> Mapping[str, Wanted]:
        """Some budgets of which the pool has more than the ledger says, as its store is of an older time."""
        assert self._cursor is not None
        cursor, entries = await self._pools.allotments.scan(self._cursor)
        self._cursor = cursor or None
        found = {}
        for budget, entered in (await self._pool.allotments.entered([*entries])).items():
            entry = entries[budget]
            part = in_force(entered.part, entered.of, max(1, entry.amount))
            if part > entry.parts.get(self._pool.name, 0) or entered.stamp > entry.stamp:
                found[budget] = Wanted(0, max(1, entry.amount), tuple(sorted(entry.parts)))
        return found

    async def _divide(self, budget: str, wanted: Wanted) -> bool:
        """Whether the budget was divided; if not, the next round tries again."""
        entry = await self._pools.allotments.entry(budget)
        names = sorted({*wanted.pools, *entry.parts})
        found = await self._found(names, budget, wanted)
        away = {name: entry.parts.get(name, 0) for name in names if name not in found}
        # Without a ledger, or with one of an older time, only the pools know what they have. A stamp that is just above
        # that of the ledger is of a leader that took, and came no further.
        is_known = entry.stamp > 0 and all(each.stamp <= entry.stamp + 1 for each in found.values())
        if away and not is_known:
            log.warning("a budget cannot be divided without pools=%s budget=%s", ",".join(away), budget)
            return False
        amount = wanted.amount - sum(away.values())
        needs = {name: each.wanted.needs for name, each in found.items() if each.wanted is not None}
        used = {name: each.used for name, each in found.items()}
        parts = divided(amount, used, needs, wanted.pools)
        stamp = max([entry.stamp, *[each.stamp for each in found.values()]]) + 1
        # The parts that fall are changed first, so that no part of the budget is in two pools at any time.
        has = {name: each.part for name, each in found.items()}
        for name, part in has.items():
            if parts[name] < max(part, entry.parts.get(name, 0)) or not is_known:
                left = await self._allot(name, budget, wanted, stamp, min(parts[name], part))
                if left is None:
                    return False  # another leader divides it
                has[name] = left
        parts = within(amount, parts, has)
        entered = LedgerEntry(stamp + 1, wanted.amount, parts | away)
        if not await self._pools.allotments.enter(budget, entry, entered):
            return False
        unused = {name: max(0, part - used[name]) for name, part in parts.items()}
        for name, part in parts.items():
            rest = sum(unused.values()) - unused[name]
            await self._allot(name, budget, wanted, stamp + 1, part, rest)
        return True

    async def _found(self, names: Sequence[str], budget: str, wanted: Wanted) -> dict[str, Allotted]:
        """The parts and the use of the pools that can be reached."""

        async def of(name: str) -> Allotted | StoreError:
            try:
                return await self._pools.pool(name).allotments.of(budget, wanted.amount, _begins_with(name, wanted))
            except StoreError as error:
                return error

        found = zip(names, await asyncio.gather(*map(of, names)), strict=True)
        return {name: each for name, each in found if isinstance(each, Allotted)}

    async def _allot(self, name: str, budget: str, wanted: Wanted, stamp: int, part: int, rest: int = 0) -> int | None:
        begins_with = _begins_with(name, wanted)
        change = Allotment(budget, wanted.amount, begins_with, stamp, part, rest)
        return await self._pools.pool(name).allotments.allot(change)


def _begins_with(name: str, wanted: Wanted) -> int:
    """The most that a pool admits by where nothing is entered."""
    if name not in wanted.pools:
        return 0
    return equal_part(wanted.amount, wanted.pools.index(name), len(wanted.pools))
