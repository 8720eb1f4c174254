"""Books of what tenants used: day by day by account, and request by request as far back as the log goes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Final

from dualmap.scheduling.request.metering import COUNTS, EXPECTED, TAKEN_BACK, Account, Counts, UsageRecord
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.tenants.budgets import Limit, budget_of, entry_of
from dualmap.scheduling.tenants.shares import Work
from dualmap.statestore.pool.allotments import leak_per_s_of
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import budget_used, counts_from, counts_text, pairs_from, work_from
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies
from dualmap.statestore.pool.scripts import USAGE_LOG

USAGE_DAYS: Final = 40
"""Days that are kept, today among them: a month, and time to read it."""
_FORGOTTEN_DAYS: Final = 60
"""Days before these that are dropped, whenever some leader comes to it."""


def day_of(now_ms: int) -> date:
    """The day in UTC."""
    return datetime.fromtimestamp(now_ms / 1000, UTC).date()


class UsageBooks(Changes):
    """Reads what was metered. Only scripts that end requests write it, and the leader drops old days."""

    @checks_replies
    async def today(self) -> date:
        """The day in UTC by the store's clock."""
        return day_of(await self._calls.now_ms())

    @checks_replies
    async def of_day(self, day: date) -> Mapping[Account, Counts]:
        """The sums over the requests that ended on a day."""
        found: dict[Account, Counts] = {}
        for account, counts in pairs_from(await self._calls.command("HGETALL", self._key(day))).items():
            with contextlib.suppress(*UNREADABLE):  # somebody changed it by hand
                found[Account.parse(account.decode())] = counts_from(counts)
        return found

    @checks_replies
    async def records(self, after: str, limit: int) -> Sequence[tuple[str, UsageRecord]]:
        """The log after entry ``after`` ('0' = from its start), oldest first, each with the name of its entry."""
        log = ("XRANGE", self._keys.usage_log, f"({after}", "+", "COUNT", limit)
        found = []
        for entry_id, flat in await self._calls.command(*log):
            with contextlib.suppress(*UNREADABLE):
                found.append((entry_id.decode(), UsageRecord.parse(pairs_from(flat)[b"record"].decode())))
        return found

    @checks_replies
    async def budgets(self, tenant: str, limits: Sequence[Limit]) -> list[float]:
        """The amount that is used now of the budget of each of a tenant's limits."""
        if not limits:
            return []
        names = [budget_of(tenant, limit) for limit in limits]
        books, kinds = zip(*map(entry_of, names), strict=True)
        read: list[Command] = [("HMGET", self._keys.books, *books), ("HMGET", self._keys.budgets_allotted, *names)]
        found, allotted = await self._calls.together(read)
        now_ms = await self._calls.now_ms()
        return [
            budget_used(text, kind, now_ms, leak_per_s_of(limit, part))
            for text, kind, part, limit in zip(found, kinds, allotted, limits, strict=True)
        ]

    @checks_replies
    async def work(self, tenants: Sequence[str]) -> Mapping[str, Work]:
        """The work that instances were given lately of those of the tenants that are active."""
        if not tenants:
            return {}
        of_all, *texts = await self._calls.command("HMGET", self._keys.books, "*", *tenants)
        now_ms, found = await self._calls.now_ms(), dict[str, Work]()
        for tenant, text in zip(tenants, texts, strict=True):
            if text is not None and of_all is not None:
                with contextlib.suppress(*UNREADABLE):
                    work = work_from(text, of_all, now_ms)
                    found |= {} if work is None else {tenant: work}
        return found

    @checks_replies
    async def taken_back(self, requests: Sequence[StoredRequest], now_ms: int) -> Change:
        """The change that undoes that requests were metered as those of a dead replica, where they were: that replica
        lives, and enters them again. ``now_ms`` is the store's time."""
        if not any(request.account for request in requests):
            return Change()
        key = self._keys.usage_lost
        texts = await self._calls.command("HMGET", key, *[request.request_id for request in requests])
        commands: list[Command] = []
        read: list[tuple[bytes, str, bytes | None]] = []
        sums: dict[tuple[bytes, str], Counts] = {}
        for request, text in zip(requests, texts, strict=True):
            if text is None:
                continue
            read.append((key, request.request_id, text))
            commands.append(("HDEL", key, request.request_id))
            with contextlib.suppress(*UNREADABLE):
                replica_id, day, rest = text.decode().split(" ", 2)
                words = rest.split(" ", len(COUNTS) + 2)
                counts, account = -Counts.parse(" ".join(words[: len(COUNTS)])), words[-1]
                if replica_id == request.replica_id:
                    of_day = self._keys.usage(day), account
                    sums[of_day] = sums.get(of_day, Counts()) + counts
                    record = (now_ms, counts, TAKEN_BACK, EXPECTED, request.request_id, account)
                    logged = ("XADD", self._keys.usage_log, "MAXLEN", "~", USAGE_LOG, "*", "record")
                    commands.append((*logged, " ".join(map(str, record))))
        formers = await self._calls.together([("HGET", *of_day) for of_day in sums]) if sums else ()
        for ((day_key, account), counts), former in zip(sums.items(), formers, strict=True):
            if former is not None:
                read.append((day_key, account, former))
                commands.append(("HSET", day_key, account, counts_text(counts_from(former) + counts)))
        return Change(commands, read)

    async def drop_old(self, *, fence: int) -> None:
        """Drop the days that are not kept any more."""
        today = await self.today()
        old = [self._key(today - timedelta(USAGE_DAYS + days)) for days in range(_FORGOTTEN_DAYS)]
        await self._make(Change((("UNLINK", *old),), fence=fence))

    def _key(self, day: date) -> bytes:
        return self._keys.usage(day.isoformat())
