"""Reports of what tenants used, for operators; and for each tenant's keys of what they used themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import date, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from dualmap.router.admin.auth import caller_of
from dualmap.router.admin.scope import PoolParam, PoolsParam, RuntimeParam
from dualmap.router.errors import InvalidRequestError, NotFoundError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.tenants.usage import (
    GROUPS,
    Books,
    UsageRow,
    grouped,
    limits_of_key,
    limits_used,
    record_line,
    tenants_now,
    usage_rows,
)
from dualmap.statestore.pool.usage import USAGE_DAYS

routes = APIRouter(prefix="/admin", tags=["usage"])
own_routes = APIRouter(tags=["usage"])

DAYS = 7
MOST_DAYS = 400

First = Annotated[date | None, Query(description="first day, in UTC; by default the sixth before the last")]
Last = Annotated[date | None, Query(description="last day, in UTC; by default today")]


@routes.get("/usage")
async def usage(
    pools: PoolsParam,
    first: First = None,
    last: Last = None,
    by: Annotated[str, Query(description=f"what to add up by: some of {', '.join(GROUPS)}")] = "day,tenant",
    tenant: Annotated[str | None, Query(description="only this tenant")] = None,
) -> dict[str, Any]:
    """Add up what requests of tenants used."""
    groups = [name.strip() for name in by.split(",") if name.strip()]
    if not groups or not set(groups) <= set(GROUPS):
        raise InvalidRequestError(f"by takes some of {', '.join(GROUPS)}, with commas between them", param="by")
    today = await pools[0].store.usage.today()
    began, ended = _days(first, last, today)
    rows = [row for row in await _rows(_books(pools), began, ended, today) if tenant in (None, row.account.tenant)]
    return {"first": began, "last": ended, "by": groups, "rows": grouped(rows, groups)}


@routes.get("/usage/now")
async def now(
    pool: PoolParam,
    runtime: RuntimeParam,
    limit: Annotated[int, Query(ge=1, le=1000, description="tenants at most: those that did most today")] = 20,
) -> list[dict[str, Any]]:
    """Tenants as they are now: what they did today, what they have held and in flight, how far their limits are used,
    and of active ones what instances were given of their work lately, beside their share of it."""
    known = runtime.tenants.tenants
    snapshot = await pool.store.snapshot()
    found = await tenants_now(
        pool.store.usage, snapshot.requests, lambda tenant: known[tenant].limits if tenant in known else (), most=limit
    )
    return [asdict(each) for each in found]


@routes.get("/usage/records")
async def records(
    pool: PoolParam,
    after: Annotated[str, Query(pattern=r"^\d+(-\d+)?$", description="the `next` of the page before")] = "0",
    limit: Annotated[int, Query(ge=1, le=10_000, description="records at most")] = 1000,
) -> dict[str, Any]:
    """Metered requests one by one, the oldest first, as far back as the log goes."""
    found = await pool.store.usage.records(after, limit)
    return {
        "records": [{"entry": entry, **record_line(record)} for entry, record in found],
        "next": found[-1][0] if found else after,
    }


@own_routes.get("/v1/usage")
async def own_usage(request: Request, runtime: RuntimeParam, first: First = None, last: Last = None) -> dict[str, Any]:
    """Report what the key of a tenant used, by day and model, and how far the limits are used that its requests can
    meet."""
    caller = caller_of(runtime.tenants, request)
    if caller is None:
        raise NotFoundError("usage is kept for the keys of tenants, and this is none; see /admin/usage")
    books = _books(runtime.pools.pools.values())
    today = await next(iter(books.values())).today()
    began, ended = _days(first, last, today)
    own = (caller.tenant.name, caller.key)
    rows = [row for row in await _rows(books, began, ended, today) if (row.account.tenant, row.account.key) == own]
    limits = limits_of_key(caller)
    return {
        "object": "usage",
        "tenant": caller.tenant.name,
        "key": caller.key,
        "first": began,
        "last": ended,
        "usage": grouped(rows, ("day", "model")),
        "limits": await limits_used(books, caller.tenant.name, limits),
    }


def _books(pools: Iterable[ServedPool]) -> Books:
    return {pool.settings.name: pool.store.usage for pool in pools}


async def _rows(books: Books, first: date, last: date, today: date) -> list[UsageRow]:
    """The rows of these days, of which those alone are read that are kept."""
    return await usage_rows(books, max(first, today - timedelta(USAGE_DAYS - 1)), min(last, today))


def _days(first: date | None, last: date | None, today: date) -> tuple[date, date]:
    ended = last or today
    try:
        began = first or ended - timedelta(DAYS - 1)
    except OverflowError as error:
        raise InvalidRequestError("last is a day too early to have days before it", param="last") from error
    if not 0 <= (ended - began).days < MOST_DAYS:
        raise InvalidRequestError(f"first must not be behind last, nor {MOST_DAYS} days before it", param="first")
    return began, ended
