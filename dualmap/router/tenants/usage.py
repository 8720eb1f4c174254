"""Rows of what tenants used, for people, bills and programs; and how far their limits are used."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date, timedelta
from typing import Any, Final

from dualmap.runtime.tenant_settings import limit_name
from dualmap.scheduling.request.metering import Account, Counts, UsageRecord
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.budgets import Limit
from dualmap.scheduling.tenants.shares import Work
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.scheduling.values import value
from dualmap.statestore.pool.usage import UsageBooks

GROUPS: Final = ("day", "pool", "tenant", "key", "class", "model")
"""Names by which counts can be added up."""

Books = Mapping[str, UsageBooks]
"""The books of usage by pool."""


@value
class UsageRow:
    """The counts of one account on one day in one pool."""

    day: date
    pool: str
    account: Account
    counts: Counts

    def names(self) -> dict[str, str]:
        """The names by which it can be grouped."""
        return {"day": self.day.isoformat(), "pool": self.pool, **_names_of(self.account)}


def _names_of(account: Account) -> dict[str, str]:
    return {"tenant": account.tenant, "key": account.key, "class": account.priority_class, "model": account.model}


async def usage_rows(books: Books, first: date, last: date) -> list[UsageRow]:
    """The rows of these days, both among them.

    Raises:
        StoreError: the store is out of reach.
    """
    days = [first + timedelta(number) for number in range((last - first).days + 1)]
    read = [(day, pool) for day in days for pool in books]
    found = await asyncio.gather(*[books[pool].of_day(day) for day, pool in read])
    return [
        UsageRow(day, pool, account, counts)
        for (day, pool), accounts in zip(read, found, strict=True)
        for account, counts in accounts.items()
    ]


def grouped(rows: Iterable[UsageRow], by: Sequence[str]) -> list[dict[str, Any]]:
    """The counts added up by these of ``GROUPS``, in their order."""
    sums: dict[tuple[str, ...], Counts] = {}
    for row in rows:
        names = row.names()
        group = tuple([names[name] for name in by])
        sums[group] = sums.get(group, Counts()) + row.counts
    return [dict(zip(by, group, strict=True)) | asdict(counts) for group, counts in sorted(sums.items())]


def record_line(record: UsageRecord) -> dict[str, Any]:
    """One metered request as exports have it."""
    counts = record.counts
    return {
        "ended_ms": record.ended_ms,
        "request_id": record.request_id,
        **_names_of(record.account),
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "outcome": record.outcome,
        "reported": record.reported,
    }


async def limits_used(books: Books, tenant: str, limits: Sequence[Limit]) -> list[dict[str, Any]]:
    """Each limit of a tenant, what is used of it now in each pool, and what is left of it in all.

    Raises:
        StoreError: the store is out of reach.
    """
    found = await asyncio.gather(*[each.budgets(tenant, limits) for each in books.values()])
    used_in_all = [sum(used) for used in zip(*found, strict=True)]
    return [
        {
            "pool": pool,
            "limit": limit_name(limit),
            "of": limit.of,
            "amount": limit.amount,
            "used": round(amount),
            "remaining": max(0, int(limit.amount - in_all)),
        }
        for pool, used in zip(books, found, strict=True)
        for limit, amount, in_all in zip(limits, used, used_in_all, strict=True)
    ]


def limits_of_key(caller: Caller) -> list[Limit]:
    """The limits that requests of a key may meet."""
    own = f"key:{caller.key}"
    return [limit for limit in caller.tenant.limits if limit.of in ("", own) or limit.of.startswith("model:")]


@value
class TenantNow:
    """One tenant in one pool, as people see it."""

    tenant: str
    today: Counts
    """The sum over its requests that ended today."""
    held: int
    running: int
    limits: tuple[tuple[str, str, float], ...] = ()
    """Name, what it is for, and the share that is used, of each of its limits."""
    work: Work | None = None
    """The work of it that instances were given; None: it is not active."""


async def tenants_now(
    books: UsageBooks,
    live: Iterable[StoredRequest],
    limits: Callable[[str], Sequence[Limit]],
    *,
    most: int,
) -> list[TenantNow]:
    """The tenants of a pool that did most today, and those with live requests, by name. ``limits`` returns those of a
    tenant.

    Raises:
        StoreError: the store is out of reach.
    """
    today: Counter[str] = Counter()
    sums: dict[str, Counts] = {}
    for account, counts in (await books.of_day(await books.today())).items():
        sums[account.tenant] = sums.get(account.tenant, Counts()) + counts
        today[account.tenant] += counts.requests + counts.refused
    held: Counter[str] = Counter()
    running: Counter[str] = Counter()
    for request in live:
        if request.tenant:
            (held if request.state is RequestState.HELD else running)[request.tenant] += 1
    named = (held + running + today).most_common(most)
    work, found = await books.work([tenant for tenant, _ in named]), []
    for tenant, _ in sorted(named):
        given = limits(tenant)
        used = await books.budgets(tenant, given)
        shares = [(limit_name(each), each.of, amount / each.amount) for each, amount in zip(given, used, strict=True)]
        now = TenantNow(
            tenant, sums.get(tenant, Counts()), held[tenant], running[tenant], tuple(shares), work.get(tenant)
        )
        found.append(now)
    return found
