"""Revisions of a pool: which instances have which, how many sessions each gets, and who changed that."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import ChangedBy
from dualmap.router.admin.scope import PoolParam
from dualmap.router.errors import InvalidRequestError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.scheduling.revisions.weights import (
    RevisionWeights,
    WeightError,
    with_shadow,
    with_tenant,
    with_weights,
    without,
)
from dualmap.scheduling.state.view import is_ready

routes = APIRouter(prefix="/admin/revisions", tags=["revisions"])


class WantedWeights(BaseModel):
    """The part of all sessions that revisions get."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: dict[str, float] = Field(
        min_length=1, description="percent of all sessions, by revision; the others share what is left as they do now"
    )
    move: bool = Field(False, description="running sessions of revisions that lose weight are placed again")


class TenantRevision(BaseModel):
    """The revision of one tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str = Field(min_length=1, description="name of the tenant")
    revision: str = Field("", description="the revision that serves it; empty: by the weights")


@routes.get("")
async def show(pool: PoolParam) -> dict[str, Any]:
    """The revisions of the pool's instances, and their weights: `version` as the store has them, `applied_version` as
    this replica places by them, which follows within a second."""
    members = await pool.store.membership()
    instances, ready = Counter[str](), Counter[str]()
    for spec in members.instances.values():
        instances[spec.revision_name] += 1
        ready[spec.revision_name] += is_ready(spec)
    weights = members.revisions
    total = sum(each.weight for each in weights.shares.values()) or 1.0
    return {
        "pool": pool.settings.name,
        "in_force": weights.in_force,
        "version": weights.version,
        "applied_version": pool.view.revisions.version,
        "revisions": [
            {
                "revision": name,
                "percent": 100 * weights.shares[name].weight / total if name in weights.shares else None,
                "instances": instances[name],
                "ready": ready[name],
            }
            for name in sorted({*instances, *weights.shares})
        ],
        "tenants": dict(weights.tenants),
        "shadow": {"revision": weights.shadow, "percent": weights.shadow_percent} if weights.shadow else None,
    }


@routes.patch("")
async def change(pool: PoolParam, wanted: WantedWeights, by: ChangedBy) -> dict[str, Any]:
    """Change how many sessions revisions get. A growing weight takes new sessions alone; `move` takes running ones."""
    parts = [f"{name} {percent:g} %" for name, percent in wanted.weights.items()]
    text = ", ".join(parts) + (", running sessions move" if wanted.move else "")
    return await _changed(pool, by, text, lambda known: with_weights(known, wanted.weights, move=wanted.move))


@routes.put("/tenants")
async def pin(pool: PoolParam, wanted: TenantRevision, by: ChangedBy) -> dict[str, Any]:
    """Have one revision serve a tenant, whatever the weights say."""
    text = f"tenant {wanted.tenant}: {wanted.revision or 'by the weights'}"
    return await _changed(pool, by, text, lambda known: with_tenant(known, wanted.tenant, wanted.revision))


class WantedShadow(BaseModel):
    """Copies of requests for a revision that answers nobody."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str = Field("", description="the revision that gets the copies; empty: none does any more")
    percent: float = Field(10.0, description="percent of all sessions whose requests are copied")


@routes.put("/shadow")
async def shadow(pool: PoolParam, wanted: WantedShadow, by: ChangedBy) -> dict[str, Any]:
    """Copy a part of the sessions' answered requests to a revision that answers nobody, or stop that."""
    known = {spec.revision_name for spec in (await pool.store.membership()).instances.values()}
    if wanted.revision and wanted.revision not in known:
        raise InvalidRequestError(f"no instance is of revision {wanted.revision!r}", param="revision")
    text = f"copies of {wanted.percent:g} % for {wanted.revision}" if wanted.revision else "no copies"
    return await _changed(pool, by, text, lambda known: with_shadow(known, wanted.revision, wanted.percent))


@routes.delete("/{revision}")
async def forget(pool: PoolParam, revision: str, by: ChangedBy) -> dict[str, Any]:
    """Forget the weight of a revision. Without any, all instances serve all sessions again."""
    return await _changed(pool, by, f"{revision} forgotten", lambda known: without(known, revision))


@routes.get("/history")
async def history(
    pool: PoolParam, limit: Annotated[int, Query(ge=1, le=1000, description="changes at most")] = 50
) -> list[dict[str, Any]]:
    """The last changes of the weights, the latest first."""
    return [asdict(each) for each in await pool.store.revisions.history(limit)]


async def _changed(pool: ServedPool, by: str, text: str, changed: Any) -> dict[str, Any]:
    known = {spec.revision_name for spec in (await pool.store.membership()).instances.values()}

    def checked(weights: RevisionWeights) -> RevisionWeights:
        after: RevisionWeights = changed(weights)
        unknown = sorted(name for name in after.shares if name not in known and name not in weights.shares)
        if unknown:
            has = ", ".join(sorted(known))
            raise WeightError(f"no instance is of revision {unknown[0]!r}; there are: {has}")
        return after

    try:
        await pool.store.revisions.change(checked, text, by=by)
    except WeightError as error:
        raise InvalidRequestError(str(error)) from error
    await pool.store.chronicle.note("operator", f"{by or 'somebody'}: revisions: {text}")
    await pool.view.refresh()
    return await show(pool)
