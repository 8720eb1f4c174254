"""The ledger of allotments: the most that each pool may have of the budgets that are divided among pools.

It lies where the tenants of all pools do. The order in which ledger and pools change is in
``scheduling.tenants.allotments``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson

from dualmap.statestore.keys import FleetKeys
from dualmap.statestore.pool.calls import Calls
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies, each_readable

SCANNED: Final = 500
"""Budgets that one call of a scan reads, about."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The division of one budget among pools."""

    stamp: int = 0
    """A number above that of every change before; 0: it was never divided."""
    amount: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    """The most that each pool has, by its name."""
    text: bytes | None = field(default=None, compare=False)
    """The entry as it was read."""

    @classmethod
    def parse(cls, text: bytes | None) -> LedgerEntry:
        """An entry that cannot be read counts as missing: pools have what they have, and it is made from that."""
        if text is None:
            return cls()
        return next(iter(each_readable({b"": text}, lambda _, each: cls._of(each)).values()), cls(text=text))

    @classmethod
    def _of(cls, text: bytes) -> LedgerEntry:
        stamp, amount, parts = orjson.loads(text)
        if not all(isinstance(each, int) and each >= 0 for each in (stamp, amount, *parts.values())):
            raise ValueError(f"no entry: {text!r}")
        return cls(stamp, amount, parts, text)


class AllotmentLedger(Changes):
    """The ledger of a fleet."""

    def __init__(self, keys: FleetKeys, calls: Calls) -> None:
        super().__init__(keys, calls)
        self._key: Final = keys.tenants_allotments

    @checks_replies
    async def entry(self, budget: str) -> LedgerEntry:
        """The entry of a budget; that of a budget that was never divided has stamp 0."""
        return LedgerEntry.parse(await self._calls.command("HGET", self._key, budget))

    @checks_replies
    async def scan(self, cursor: int) -> tuple[int, Mapping[str, LedgerEntry]]:
        """Some entries by budget, and the cursor for the next ones, which is 0 after the last ones, and before the
        first."""
        following, flat = await self._calls.command("HSCAN", self._key, cursor, "COUNT", SCANNED)
        entries = {name.decode(): LedgerEntry.parse(text) for name, text in pairs_from(flat).items()}
        return int(following), entries

    @checks_replies
    async def enter(self, budget: str, former: LedgerEntry, new: LedgerEntry) -> bool:
        """Write an entry; False where ``former`` does not stand any more."""
        text = orjson.dumps((new.stamp, new.amount, new.parts))
        change = Change((("HSET", self._key, budget, text),), ((self._key, budget, former.text),))
        return await self._make(change) is not None
