"""Instances: list, add, update, drain, resume, remove. Changes reach every replica through the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import ChangedBy
from dualmap.router.admin.scope import PoolParam, PoolsParam, RuntimeParam, pool_of
from dualmap.router.errors import ConflictError, InvalidRequestError, NotFoundError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.runtime.pool_settings import (
    BaseUrl,
    DispatchWindow,
    InstanceSettings,
    KvCapacity,
    PrefillRate,
    QueuedRequests,
    RevisionLabel,
    RunningRequests,
)
from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.estimates.kv_tiers import InstanceTiers
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent, next_state
from dualmap.statestore.call_values import Note
from dualmap.statestore.errors import StoreError
from dualmap.statestore.kv_views import KvEventRecord
from dualmap.statestore.pool.chronicle import KEPT_MEMBER_CHANGES

log = logging.getLogger(__name__)

routes = APIRouter(prefix="/admin/instances", tags=["instances"])

REMOVE_POLL_S = 0.2
SEVERAL_GROUPS = "its model has several cache groups, and events do not show which of them is there"
STATE_RACES = 5
"""Tries of a change of state before concurrent changes are reported as a conflict."""

InstanceId = Annotated[str, Path(description="instance id")]


class InstanceChanges(BaseModel):
    """Fields to change; what is left out stays. An instance that moves to another machine is a new instance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: BaseUrl | None = Field(None, description="base URL of the vLLM server")
    role: Role | None = Field(None, description="mixed, prefill or decode: what new requests it serves")
    prefill_tokens_per_s: PrefillRate | None = Field(None, description="prior of the learned prefill rate")
    kv_capacity_tokens: KvCapacity | None = Field(None, description="KV cache size in tokens")
    dispatch_window_tokens: DispatchWindow | None = Field(None, description="room for dispatched, unprefilled tokens")
    max_running_requests: RunningRequests | None = Field(None, description="dispatched and unfinished requests at most")
    max_queued_requests: QueuedRequests | None = Field(None, description="held requests at most")
    revision: RevisionLabel | None = Field(None, description="label of its revision; empty: none")


class NewInstance(InstanceSettings):
    pool: str | None = Field(None, description="pool it joins; may be left out when there is one pool")


class Instance(BaseModel):
    """An instance: its description, and its load at this moment."""

    pool: str
    id: str
    url: str
    role: str
    state: str
    prefill_tokens_per_s: float = Field(description="prior of the learned rate")
    kv_capacity_tokens: int
    dispatch_window_tokens: int
    max_running_requests: int
    max_queued_requests: int
    data_parallel_rank: int | None = Field(None, description="rank of the server at this URL that it is")
    revision: str = Field("", description="label of its engine version, model revision and flags; empty: none")
    drain_within_s: float | None = Field(
        None, description="time after which what it has goes elsewhere while it drains; null: as its pool says"
    )
    adapter_slots: int = Field(0, description="adapters that it has on the device at a time; 0: not known")
    adapter_host_slots: int = Field(
        0, description="adapters that it has in host memory, those on the device among them; 0: not known"
    )
    models: dict[str, str] | None = Field(
        None,
        description="model names that its server lists; for an adapter the model that it adapts, else empty. null: not"
        " known, and it is taken to serve any name",
    )
    adapters: dict[str, str] | None = Field(
        None, description="paths of the adapters among them, as far as its server says them"
    )
    trouble: str | None = Field(None, description="what its last health check found wrong, in words")
    trouble_since_ms: int | None = Field(None, description="since when, Unix time by the store's clock")
    kv_view: str | None = Field(
        None, description="how its prefix cache is known: exact or partial by its KV events, or an estimate"
    )
    kv_view_reason: str | None = Field(None, description="why it is not exact; null where no events are followed")
    tiers: list[dict[str, Any]] | None = Field(
        None,
        description="the tiers behind its device, the nearest first: tier, tokens, price (start_s, token_s), and the"
        " reason where the price is a default; null where it has none",
    )
    pulls: dict[str, Any] | None = Field(
        None,
        description="where others pull from its prefix cache: host, port, layout, the price of a pull to it, with the"
        " reason where that is a default, and whether its engine fails a request whose pull is lost (fails_requests);"
        " null where it takes no part",
    )
    no_pulls: str | None = Field(None, description="why it takes no part, where its pool has pulls")
    unused_tiers: str | None = Field(None, description="why placements expect nothing of its tiers, where it has some")
    load: dict[str, Any] | None = Field(None, description="null until the store has one")
    warning: str | None = Field(None, description="what is taken, but hardly meant")


class InstanceList(BaseModel):
    instances: list[Instance]


class InstanceChange(BaseModel):
    """A change of an instance by an operator."""

    at_ms: int
    pool: str
    by: str = Field(description="the administrator, the client's certificate, or its address with the name it claims")
    action: str = Field(description="add, change, drain, resume or remove")
    instance: str
    detail: str


@routes.get("")
async def list_instances(pools: PoolsParam) -> InstanceList:
    """Every instance with its state and load."""
    instances: list[Instance] = []
    for pool in pools:
        snapshot = await pool.store.snapshot()
        instances += [
            _instance(
                pool,
                spec,
                snapshot.loads.get(instance_id),
                note=snapshot.notes.get(instance_id),
                view=snapshot.kv_views.get(instance_id),
                tiers=snapshot.tiers.get(instance_id),
            )
            for instance_id, spec in snapshot.instances.items()
        ]
    return InstanceList(instances=instances)


@routes.get("/history")
async def history(
    pools: PoolsParam,
    instance: Annotated[str | None, Query(description="what was done to this one alone")] = None,
    limit: Annotated[int, Query(ge=1, le=KEPT_MEMBER_CHANGES, description="changes at most")] = 100,
) -> list[InstanceChange]:
    """The last changes of instances, the latest first: when, by whom, what. The last 1,000 of each pool are kept."""
    found = [
        InstanceChange(pool=pool.settings.name, **asdict(change))
        for pool in pools
        for change in await pool.store.chronicle.member_changes(KEPT_MEMBER_CHANGES)
        if instance is None or change.instance == instance
    ]
    return sorted(found, key=lambda change: -change.at_ms)[:limit]


@routes.post("", status_code=201)
async def add_instance(runtime: RuntimeParam, instance: NewInstance, by: ChangedBy) -> Instance:
    """Add an instance. It starts as `starting` and is given requests once its health check has made it `ready`;
    only keys next to its anchor points move to it."""
    pool = pool_of(runtime, instance.pool)
    members = (await pool.store.membership()).instances
    if instance.id in members:
        raise ConflictError(f"there is an instance {instance.id!r} already; change it by PATCH", param="id")
    if instance.kv_events is not None:
        raise InvalidRequestError(
            "where an instance publishes KV events is configured in the workers: pools[].kv_events", param="kv_events"
        )
    spec = instance.spec()
    await pool.store.members.put_instance(spec)
    await _note(pool, by, "add", spec.instance_id, spec.url)
    await pool.view.refresh()
    return _instance(pool, spec, None, warning=_duplicate_url_warning(spec, members))


@routes.patch("/{instance_id}")
async def update_instance(
    pool: PoolParam, instance_id: InstanceId, changes: InstanceChanges, by: ChangedBy
) -> Instance:
    """Change the description of an instance; its state, load and queue stay."""
    wanted = changes.model_dump(exclude_none=True)
    if changes.url is not None:
        wanted["models"] = None  # what another server lists is not known yet
    await pool.store.members.update_instance(instance_id, wanted)
    given = changes.model_dump(exclude_none=True, mode="json")
    await pool.view.refresh()
    await _known(pool, instance_id)
    await _note(pool, by, "change", instance_id, ", ".join(f"{name}={value}" for name, value in given.items()))
    changed = await _known(pool, instance_id)
    members = (await pool.store.membership()).instances if changes.url is not None else {}
    return _instance(pool, changed, None, warning=_duplicate_url_warning(changed, members))


@routes.post("/{instance_id}/drain")
async def drain_instance(
    pool: PoolParam,
    instance_id: InstanceId,
    by: ChangedBy,
    within_s: Annotated[
        float | None,
        Query(ge=0, le=86_400, description="time after which what it still has goes elsewhere, seconds"),
    ] = None,
) -> Instance:
    """Send the instance nothing new; what it has is finished, what is held for it moves. Then it is on standby.

    With `within_s`, or `drain_within_s` of its pool, what it still has after that time goes elsewhere: streams from
    where they are, other answers from their begin. What cannot is finished.
    """
    await pool.store.members.update_instance(instance_id, {"drain_within_s": within_s})
    drained = await _apply(pool, instance_id, InstanceEvent.DRAIN)
    await _note(pool, by, "drain", instance_id, "" if within_s is None else f"within {within_s:g} s")
    return drained


@routes.post("/{instance_id}/resume")
async def resume_instance(pool: PoolParam, instance_id: InstanceId, by: ChangedBy) -> Instance:
    """Put a drained, parked or failed instance back into service."""
    resumed = await _apply(pool, instance_id, InstanceEvent.RESUME)
    await _note(pool, by, "resume", instance_id)
    return resumed


@routes.delete("/{instance_id}", status_code=204)
async def remove_instance(
    pool: PoolParam,
    runtime: RuntimeParam,
    instance_id: InstanceId,
    by: ChangedBy,
    wait_s: Annotated[float, Query(ge=0, le=60, description="time for it to finish what it has, seconds")] = 5.0,
) -> None:
    """Drain an instance, and forget it once it has nothing left to do.

    409 when it still has requests after `wait_s`: it takes no new ones, and the call can be repeated. An instance
    that is configured comes back when a worker starts.
    """
    begins = (await _known(pool, instance_id)).state not in (InstanceState.DRAINING, InstanceState.STANDBY)
    await _apply(pool, instance_id, InstanceEvent.DRAIN)
    clock = runtime.context.clock
    until_s = clock.monotonic_s() + wait_s
    while not await pool.store.members.remove_instance(instance_id):
        load = (await pool.store.loads_of(instance_id)).get(instance_id)
        if load is None:
            break  # it was removed meanwhile
        if clock.monotonic_s() >= until_s:
            if begins:  # else this is a repetition
                await _note(pool, by, "remove", instance_id, "it drains first")
            raise ConflictError(
                f"instance {instance_id!r} is {load.state}, with {load.queued_requests} held and "
                f"{load.running_requests} running requests left; repeat the call when they are done"
            )
        await clock.sleep(REMOVE_POLL_S)
    await _note(pool, by, "remove", instance_id)
    await pool.view.refresh()


async def _note(pool: ServedPool, by: str, action: str, instance_id: str, detail: str = "") -> None:
    """Write down who did what, in the log of this replica and in the store."""
    log.info(
        "instance %s of pool %s: %s by %s%s",
        instance_id, pool.settings.name, action, by or "an unknown client", f": {detail}" if detail else "",
    )  # fmt: skip
    try:
        await pool.store.chronicle.member_changed(by, action, instance_id, detail)
    except StoreError as error:  # it is done, and in the log
        log.warning("what was done to instance %s is in no record: %s", instance_id, error)


async def _known(pool: ServedPool, instance_id: str) -> InstanceSpec:
    spec = (await pool.store.membership()).instances.get(instance_id)
    if spec is None:
        raise NotFoundError(f"pool {pool.settings.name!r} has no instance {instance_id!r}", param="instance_id")
    return spec


async def _apply(pool: ServedPool, instance_id: str, event: InstanceEvent) -> Instance:
    """Change the state by the table of an instance's life; other changes may happen at the same time."""
    for _ in range(STATE_RACES):
        spec = await _known(pool, instance_id)
        try:
            state = next_state(spec.state, event)
        except TransitionError as error:
            raise ConflictError(str(error)) from error
        if await pool.store.members.set_instance_state(instance_id, state, expected=spec.state):
            await pool.view.refresh()
            return _instance(pool, replace(spec, state=state), None)
    raise ConflictError(f"the state of instance {instance_id!r} keeps changing; try again")


def _duplicate_url_warning(spec: InstanceSpec, members: Mapping[str, InstanceSpec]) -> str | None:
    """A warning if another instance has the same URL."""
    for other in members.values():
        same = (other.url, other.data_parallel_rank) == (spec.url, spec.data_parallel_rank)
        if same and other.instance_id != spec.instance_id:
            return f"{other.instance_id!r} has the URL {spec.url} already: that server counts twice now"
    return None


def _instance(
    pool: ServedPool,
    spec: InstanceSpec,
    load: InstanceLoad | None,
    *,
    warning: str | None = None,
    note: Note | None = None,
    view: KvEventRecord | None = None,
    tiers: InstanceTiers | None = None,
) -> Instance:
    fields = asdict(spec)
    if tiers is not None:
        fields["tiers"] = [asdict(each) for each in tiers.tiers] or None
        fields["pulls"] = None if tiers.pulls is None else asdict(tiers.pulls)
        fields["no_pulls"] = tiers.no_pulls or None
        if load is not None and load.hit_step_tokens:
            fields["unused_tiers"] = SEVERAL_GROUPS if tiers.tiers else None
            if tiers.pulls is not None:
                fields |= {"pulls": None, "no_pulls": SEVERAL_GROUPS}
    if view is not None:
        fields |= {"kv_view": view.status.value, "kv_view_reason": view.reason or None}
    if note is not None:
        fields |= {"trouble": note.text, "trouble_since_ms": note.since_ms}
    return Instance(pool=pool.settings.name, id=fields.pop("instance_id"), **fields, load=_load(load), warning=warning)


def _load(load: InstanceLoad | None) -> dict[str, Any] | None:
    if load is None:
        return None
    fields = asdict(load)
    for known in ("instance_id", "state", "hit_blocks", "tiers"):
        del fields[known]
    return fields | {"kv_usage": load.kv_usage}
