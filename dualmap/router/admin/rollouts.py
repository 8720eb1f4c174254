"""Rollouts: a new revision gets more and more sessions while figures say that it is as good as the one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import ChangedBy
from dualmap.router.admin.scope import PoolParam
from dualmap.router.errors import ConflictError, InvalidRequestError, NotFoundError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.scheduling.revisions.gate import BOUNDED, Bounds, Events
from dualmap.scheduling.revisions.rollout import (
    ENDED,
    STEPS,
    Move,
    Rollout,
    RolloutState,
    begun,
    resumed,
    rolled_back,
)
from dualmap.scheduling.revisions.weights import RevisionWeights, WeightError

routes = APIRouter(prefix="/admin/rollout", tags=["revisions"])


class NewRollout(BaseModel):
    """A rollout to start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str = Field(description="the revision that is to get more and more sessions")
    steps: tuple[float, ...] = Field(STEPS, description="percent of all sessions, step by step")
    shadow: float = Field(
        0.0, ge=0, le=100, description="percent of all sessions that are copied to it before it serves any; 0: none"
    )
    bounds: dict[str, float] = Field(
        {},
        description="how much worse it may be: ratios of ttft and tpot, shares of errors, late, slow and differs; any"
        " other name is a figure of your own",
    )


class OwnEvents(BaseModel):
    """Events of the operator's own, as answers that an evaluation found wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, description="the figure, one of the rollout's bounds")
    revision: str = Field(description="the revision that they are of")
    of: int = Field(ge=1, le=10**9, description="events")
    bad: int = Field(ge=0, le=10**9, description="those that went wrong")


@routes.get("")
async def status(pool: PoolParam) -> dict[str, Any]:
    """The rollout that runs, or the last one; `rollout` is null where there was none."""
    rollout = await pool.store.revisions.rollout()
    return {"pool": pool.settings.name, "rollout": None if rollout is None else rollout.described()}


@routes.post("", status_code=201)
async def start(pool: PoolParam, wanted: NewRollout, by: ChangedBy) -> dict[str, Any]:
    """Start a rollout with its first step. The gate, run by the leader, makes the others."""
    try:
        bounds = Bounds.of(wanted.bounds)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="bounds") from error
    known = {spec.revision_name for spec in (await pool.store.membership()).instances.values()}
    if wanted.revision not in known:
        raise InvalidRequestError(
            f"no instance is of revision {wanted.revision!r}; there are: {', '.join(sorted(known))}", param="revision"
        )

    def planned(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        if rollout is not None and rollout.state not in ENDED:
            raise ConflictError(f"the rollout of {rollout.revision} is {rollout.state}: roll it back first")
        if not weights.in_force:
            others = sorted(known - {wanted.revision})
            if len(others) != 1:
                raise WeightError("give the revisions that serve now their weights first: dualmap revisions set")
            weights = RevisionWeights.alone(others[0])
        return begun(wanted.revision, wanted.steps, bounds, weights, now_ms, shadow=wanted.shadow)

    return await _conducted(pool, by, planned)


@routes.post("/pause")
async def pause(pool: PoolParam, by: ChangedBy) -> dict[str, Any]:
    """Hold the rollout where it is, whatever the figures say."""

    def planned(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        under_way = _under_way(rollout)
        why = f"paused by {by or 'somebody'}"
        return Move(replace(under_way, state=RolloutState.PAUSED, why=why, since_ms=now_ms), weights, why)

    return await _conducted(pool, by, planned)


@routes.post("/resume")
async def resume(pool: PoolParam, by: ChangedBy) -> dict[str, Any]:
    """Go on with a paused rollout: its step begins again."""

    def planned(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        return resumed(_under_way(rollout), weights, now_ms)

    return await _conducted(pool, by, planned)


@routes.post("/rollback")
async def rollback(pool: PoolParam, by: ChangedBy) -> dict[str, Any]:
    """Take all sessions of the revision back, at once; also after the rollout is done."""

    def planned(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        if rollout is None:
            raise NotFoundError("there was no rollout")
        return rolled_back(rollout, weights, now_ms, f"by {by or 'somebody'}")

    return await _conducted(pool, by, planned)


@routes.post("/events")
async def report(pool: PoolParam, events: OwnEvents, by: ChangedBy) -> dict[str, Any]:
    """Add events of the operator's own to the step that is held."""

    def planned(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        under_way = _under_way(rollout)
        if events.name not in under_way.bounds.own:
            raise WeightError(f"the rollout has no bound {events.name!r} of your own; it has: {_own(under_way)}")
        if events.bad > events.of:
            raise WeightError("more events went wrong than there were")
        by_revision = dict(under_way.own.get(events.name, {}))
        so_far = by_revision.get(events.revision, Events())
        by_revision[events.revision] = Events(so_far.of + events.of, so_far.bad + events.bad)
        return Move(replace(under_way, own={**under_way.own, events.name: by_revision}), weights, "")

    return await _conducted(pool, by, planned)


def _own(rollout: Rollout) -> str:
    return ", ".join(sorted(rollout.bounds.own)) or f"only {', '.join(BOUNDED)}"


def _under_way(rollout: Rollout | None) -> Rollout:
    if rollout is None or rollout.state in ENDED:
        raise ConflictError("no rollout is under way")
    return rollout


async def _conducted(
    pool: ServedPool, by: str, planned: Callable[[Rollout | None, RevisionWeights, int], Move]
) -> dict[str, Any]:
    try:
        move = await pool.store.revisions.conduct(planned, by=by)
    except WeightError as error:
        raise InvalidRequestError(str(error)) from error
    assert move is not None
    if move.text:
        await pool.store.chronicle.note("rollout", f"{by or 'somebody'}: {move.text}")
        await pool.view.refresh()
    return await status(pool)
