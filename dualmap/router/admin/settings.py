"""Scheduling settings of the running fleet: what is in effect, changes, and their history."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import SAID_BY, named_or
from dualmap.router.admin.scope import PoolParam
from dualmap.router.errors import InvalidRequestError
from dualmap.router.settings import not_finite

routes = APIRouter(prefix="/admin/settings", tags=["settings"])


class SettingsChanges(BaseModel):
    """Settings to change, by dotted name without ``scheduling.``; null reverts a change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    changes: dict[str, Any] = Field(min_length=1, description='for example {"policy": "dualmap"}')
    by: str = Field("", max_length=200, description="who changes them, for the history, where the key does not say it")


@routes.get("")
async def effective(pool: PoolParam) -> dict[str, Any]:
    """The scheduling settings in effect, and which of them were changed in the running fleet."""
    overrides = dict((await pool.store.membership()).overrides)
    scheduling = pool.store.settings.in_force(overrides)
    return {"pool": pool.settings.name, "changed": overrides, "scheduling": scheduling.model_dump(mode="json")}


@routes.patch("")
async def change(pool: PoolParam, wanted: SettingsChanges, request: Request) -> dict[str, Any]:
    """Change settings for all replicas and workers: each replica follows with its next reply from the store."""
    known = (await pool.store.membership()).overrides
    try:
        scheduling = pool.store.settings.in_force_after(known, wanted.changes)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="changes") from error
    for name in not_finite(scheduling):
        raise InvalidRequestError(f"scheduling.{name} must be finite", param="changes")
    by = named_or(request, request.headers.get(SAID_BY) or wanted.by)
    await pool.store.settings.change(wanted.changes, by=by)
    await pool.view.refresh()
    return await effective(pool)


@routes.get("/history")
async def history(
    pool: PoolParam, limit: Annotated[int, Query(ge=1, le=1000, description="changes at most")] = 50
) -> list[dict[str, Any]]:
    """The last changes, the latest first."""
    changes = await pool.store.settings.history(limit)
    return [{"at_ms": change.at_ms, "by": change.by, "changes": dict(change.changes)} for change in changes]
