"""Adapters that operators, and tenants with a folder of their own, register and unload while the fleet runs.

vLLM's own calls, for a pool: the name is registered once, loaded on its homes at once and elsewhere when a request
needs it, and unloaded everywhere. ``scheduling.state.registered_adapters`` has what a registration is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import Admin, caller_of
from dualmap.router.admin.engine_control import control, empty_caches, keeps_cache
from dualmap.router.admin.scope import PoolParam, RuntimeParam
from dualmap.router.errors import (
    ConflictError,
    ForbiddenPathError,
    InvalidApiKeyError,
    InvalidRequestError,
    NoInstanceError,
    NotFoundError,
    RateLimitError,
    RouterError,
    no_instance,
)
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.tenant_budgets import pools_of
from dualmap.router.tenants.rate_limits import duration
from dualmap.runtime.engine_adapters import LOAD_PATH, UNLOAD_PATH, Made
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.registered_adapters import (
    LARGEST_RANK,
    LONGEST_NAME,
    LONGEST_PATH,
    MOST_ADAPTERS,
    AdapterState,
    RegisteredAdapter,
    Step,
    homes_of,
    is_folder,
    lies_in,
    normal_path,
    step_for,
)
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.budgets import Draw, Draws, Limit, Measure, Period, budgets_of, drawn_text, nothing_of
from dualmap.scheduling.tenants.tenant import Tenant

log = logging.getLogger(__name__)

_SHOWN: Final = 4
"""Instances whose failures an answer names."""
_MORE_CALLS: Final = 10
"""Calls a minute that a tenant may make beside one to load and one to unload each of its adapters: each moves weights
on instances, and may take another adapter's place there."""


class LoadAdapter(BaseModel):
    """vLLM's fields, and what a fleet wants to know besides."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_name: str = Field(min_length=1, max_length=LONGEST_NAME, description="the name that clients use")
    lora_path: str = Field(
        min_length=1, max_length=LONGEST_PATH, description="folder on the engines' hosts, or what they download"
    )
    load_inplace: bool = Field(False, description="replace the weights of an adapter of this name")
    is_3d_lora_weight: bool = Field(False, description="as vLLM has it")
    rank: int | None = Field(None, ge=1, le=LARGEST_RANK, description="its rank, where known")
    base_model_name: str | None = Field(None, description="the model that it adapts: the pool's, by any of its names")
    tenant: str | None = Field(None, description="the tenant that alone may use it; operators choose, else everyone")


class UnloadAdapter(BaseModel):
    """vLLM's field."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_name: str = Field(min_length=1, description="the name that was registered")


def routes_for(find_admin: Callable[[Request], Admin]) -> APIRouter:
    """The calls, for admins and for tenants with folders of their own."""
    routes = APIRouter(tags=["engine control"])

    def tenant_of(request: Request, runtime: RuntimeParam) -> Tenant | None:
        """The tenant that calls; None: an operator. Raises RouterError for anyone else."""
        with contextlib.suppress(InvalidApiKeyError):
            caller = caller_of(runtime.tenants, request)
            if caller is not None and caller.tenant.adapter_paths:
                return caller.tenant
        find_admin(request)
        return None

    by_tenant = Depends(tenant_of)

    @routes.post(LOAD_PATH, name="load_lora_adapter", operation_id="load_lora_adapter")
    async def load(
        request: Request, pool: PoolParam, runtime: RuntimeParam, wanted: LoadAdapter, tenant: Tenant | None = by_tenant
    ) -> Response:
        """Register an adapter for the pool, and load it on its homes: the two instances of its hash key. Others load it
        when a request needs it. A name that is registered with another path is replaced with `load_inplace` alone.
        Operators need the admin key; a tenant's own key will do for paths below its `adapter_paths`."""
        asked = _asked(pool, runtime, tenant, wanted)
        await _draw_call(pool, runtime, tenant)
        return await _load(pool, runtime, tenant, wanted, asked, keeps_kv=keeps_cache(request))

    @routes.post(UNLOAD_PATH, name="unload_lora_adapter", operation_id="unload_lora_adapter")
    async def unload(
        request: Request,
        pool: PoolParam,
        runtime: RuntimeParam,
        named: UnloadAdapter,
        tenant: Tenant | None = by_tenant,
    ) -> Response:
        """Serve an adapter no more, and unload it wherever it is. Requests that have begun end by themselves."""
        await _draw_call(pool, runtime, tenant)
        return await _unload(request, pool, runtime, tenant, named.lora_name)

    return routes


async def _draw_call(pool: ServedPool, runtime: Runtime, tenant: Tenant | None) -> None:
    """Draw one call from those that a tenant may make a minute, over all replicas. Operators may make any.

    Raises:
        RateLimitError: there is none left.
    """
    if tenant is None:
        return
    a_minute = 2 * tenant.max_adapters + _MORE_CALLS
    budgets = budgets_of(tenant.name, [Limit(Measure.REQUESTS, Period.MINUTE, a_minute, "adapters")])
    draws = Draws.of(*[Draw(each, 1) for each in budgets])
    call_id, replica_id = f"adapters-{secrets.token_hex(8)}", runtime.context.replica_id
    call = StoredRequest(
        call_id,
        replica_id,
        "",
        RequestState.DISPATCHED,
        1,
        uncached_tokens=0,
        prompt_tokens=0,
        expected_output_tokens=0,
        slo_ms=0,
        tenant=tenant.name,
        drawn=drawn_text(draws),
    )
    status, drawn = await pool.store.register(call, draws)
    if status is PlaceStatus.LIMITED:
        raise RateLimitError(
            f"tenant {tenant.name} may register and unload adapters {a_minute} times a minute in pool"
            f" {pool.settings.name!r}, twice for each of its max_adapters and {_MORE_CALLS} times more: try again in"
            f" {duration(drawn.wait_s)}, and keep adapters registered that are used again",
            counted="requests",
            retry_after_s=drawn.wait_s,
        )
    await pool.store.release([Release(call_id, replica_id=replica_id, returned=nothing_of(draws))])


def _asked(pool: ServedPool, runtime: Runtime, tenant: Tenant | None, wanted: LoadAdapter) -> RegisteredAdapter:
    """The adapter that a call registers. Costs neither the store nor an instance anything.

    Raises:
        RouterError: the call alone shows that it cannot be.
    """
    name = wanted.lora_name
    path = _path_of(wanted, tenant)
    if not name.isprintable() or name != name.strip():
        raise InvalidRequestError("lora_name must be printable, without blanks at its ends", param="lora_name")
    if tenant is not None and pool.settings.name not in pools_of(runtime.pools, tenant):
        raise NotFoundError(f"there is no pool {pool.settings.name!r} for tenant {tenant.name}", param="pool")
    return RegisteredAdapter(
        path,
        base=_base_of(pool, wanted.base_model_name),
        rank=wanted.rank or 0,
        tenant=_owner_of(runtime, tenant, wanted),
        is_3d=wanted.is_3d_lora_weight,
    )


async def _load(
    pool: ServedPool,
    runtime: Runtime,
    tenant: Tenant | None,
    wanted: LoadAdapter,
    asked: RegisteredAdapter,
    *,
    keeps_kv: bool,
) -> Response:
    name, path, owner = wanted.lora_name, asked.path, asked.tenant
    await pool.view.refresh()
    _check_free(runtime, pool, tenant, name)
    listed = _listed_path(pool, name)
    former: RegisteredAdapter | None = None

    def changed(known: RegisteredAdapter | None, others: Mapping[str, RegisteredAdapter]) -> RegisteredAdapter | None:
        nonlocal former
        former = known
        _check_room(name, others, owner, tenant)
        return _next_record(name, known, asked, listed, replaces=wanted.load_inplace, keeps_kv=keeps_kv)

    if not pool.view.view.ready:
        raise no_instance(pool.settings.name)
    made = await pool.store.adapters.change(name, changed)
    view = await pool.view.refresh()
    homes = sorted(homes_of(view, pool.settings.model, name))
    if made is None and not any(pool.adapter_loads.lacks(each, name) for each in homes):
        raise InvalidRequestError(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
            " 'load_inplace' to True.",
            param="lora_name",
        )
    results = await asyncio.gather(*(pool.adapter_loads.ensure(each, name) for each in homes))
    failed = {instance_id: each for instance_id, each in zip(homes, results, strict=True) if each.complaint}
    if failed and len(failed) == len(homes):
        if made is not None:
            await pool.store.adapters.take_back(name, made, former)
            await pool.view.refresh()
        raise _load_failed(name, failed)
    log.info("adapter registered pool=%s name=%s path=%s tenant=%s", pool.settings.name, name, path, owner or None)
    return _success(f"Success: LoRA adapter '{name}' added successfully.", failed)


def _next_record(
    name: str,
    known: RegisteredAdapter | None,
    asked: RegisteredAdapter,
    listed: str | None,
    *,
    replaces: bool,
    keeps_kv: bool,
) -> RegisteredAdapter | None:
    """The record of a name after a call; None: it stays as it is. ``listed`` is a path with which instances list the
    name by themselves.

    Raises:
        RouterError: it is another adapter's name.
    """
    if known is None:
        if listed is not None and listed != asked.path and not replaces:
            raise _other_path(name, listed)
        return replace(asked, generation=int(listed == asked.path and replaces))
    if known.is_registered:
        if known.tenant != asked.tenant:
            raise ConflictError(f"the adapter {name!r} belongs to somebody else: unload it first", param="lora_name")
        if not replaces:
            if known.path != asked.path:
                raise _other_path(name, known.path)
            asked = replace(asked, rank=asked.rank or known.rank, generation=known.generation, since_ms=known.since_ms)
            return None if asked == known else asked
    same = known.path == asked.path
    if same and replaces and not is_folder(asked.path):
        raise InvalidRequestError(
            "engines name KV by the name and the path of an adapter, so new weights under the same ones would be"
            " answered from the former KV: load them from another path",
            param="lora_path",
        )
    keeps = keeps_kv and same and not replaces
    return replace(asked, generation=known.generation if keeps else known.generation + 1)


def _other_path(name: str, path: str) -> ConflictError:
    return ConflictError(
        f"the adapter {name!r} is loaded from {path!r}: say load_inplace to replace it, or choose another name",
        param="lora_name",
    )


def _path_of(wanted: LoadAdapter, tenant: Tenant | None) -> str:
    try:
        path = normal_path(wanted.lora_path)
    except ValueError as error:
        raise InvalidRequestError(f"lora_path {error}", param="lora_path") from error
    if tenant is not None and not lies_in(path, tenant.adapter_paths):
        raise ForbiddenPathError(
            f"tenant {tenant.name} may load adapters from below {', '.join(tenant.adapter_paths)} alone"
        )
    return path


def _check_free(runtime: Runtime, pool: ServedPool, tenant: Tenant | None, name: str) -> None:
    """Raises ConflictError where the name is no free name for an adapter of the pool."""
    route, source = runtime.pools.routes.get(name), runtime.pools.source_of(name)
    if route is None or (source == "registered" and route.pool is pool):
        return
    is_free = source == "listed" and route.lora is not None and route.pool is pool and tenant is None
    if not is_free:
        raise ConflictError(f"the model name {name!r} is taken ({source}): choose another one", param="lora_name")


def _owner_of(runtime: Runtime, tenant: Tenant | None, wanted: LoadAdapter) -> str:
    if tenant is not None:
        if wanted.tenant not in (None, tenant.name):
            raise ForbiddenPathError("a tenant registers adapters for itself alone: leave tenant out")
        return tenant.name
    owner = wanted.tenant or ""
    if owner and owner not in runtime.tenants.tenants:
        raise InvalidRequestError(f"there is no tenant {owner[:64]!r}", param="tenant")
    return owner


def _base_of(pool: ServedPool, base: str | None) -> str:
    names = (pool.settings.model, *pool.settings.aliases)
    if base is not None and base not in names:
        raise InvalidRequestError(
            f"pool {pool.settings.name!r} serves {', '.join(names)}: it has no adapters of {base!r}",
            param="base_model_name",
        )
    return base or ""


def _listed_path(pool: ServedPool, name: str) -> str | None:
    """The path of an adapter that instances list by themselves."""
    if name in pool.view.adapters:
        return None
    paths = [(spec.adapters or {}).get(name) for spec in pool.view.view.instances.values()]
    return next((path for path in paths if path is not None), None)


def _check_room(name: str, known: Mapping[str, RegisteredAdapter], owner: str, tenant: Tenant | None) -> None:
    others = [each for other, each in known.items() if other != name and each.is_registered]
    if len(others) >= MOST_ADAPTERS:
        raise ConflictError(f"the pool has {MOST_ADAPTERS} adapters, which is the most: unload some", param="lora_name")
    if tenant is not None and sum(each.tenant == owner for each in others) >= tenant.max_adapters:
        raise ConflictError(
            f"tenant {owner} has {tenant.max_adapters} adapters in this pool, which is the most (max_adapters):"
            " unload some",
            param="lora_name",
        )


async def _unload(request: Request, pool: ServedPool, runtime: Runtime, tenant: Tenant | None, name: str) -> Response:
    await pool.view.refresh()

    def changed(known: RegisteredAdapter | None, _: Mapping[str, Any]) -> RegisteredAdapter | None:
        if known is None or not known.is_registered or (tenant is not None and known.tenant != tenant.name):
            return None
        return replace(known, state=AdapterState.UNLOADED)

    made = await pool.store.adapters.change(name, changed)
    if made is None:
        if tenant is None and name not in pool.view.adapters:  # what engines have by themselves
            return await control(request, [pool], runtime)
        raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    view = await pool.view.refresh()
    having = [
        spec
        for spec in view.instances.values()
        if spec.state is not InstanceState.STANDBY and step_for(spec, name, made) is Step.UNLOAD
    ]
    results = await asyncio.gather(*(pool.adapter_loads.make(spec, name, made, Step.UNLOAD) for spec in having))
    failed = {spec.instance_id: each for spec, each in zip(having, results, strict=True) if each.complaint}
    log.info("adapter unloaded pool=%s name=%s path=%s", pool.settings.name, name, made.path)
    if not is_folder(made.path) and not keeps_cache(request):
        await empty_caches(pool, runtime)
    return _success(f"Success: LoRA adapter '{name}' removed successfully.", failed)


def _success(text: str, failed: Mapping[str, Made]) -> Response:
    if failed:
        text += f" Not yet at {_listed(failed)}; the leader tries again."
    return Response(text, media_type="text/plain")


def _listed(failed: Mapping[str, Made]) -> str:
    named = [f"{instance_id}: {each.complaint}" for instance_id, each in [*failed.items()][:_SHOWN]]
    return "; ".join(named) + (f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else "")


def _load_failed(name: str, failed: Mapping[str, Made]) -> RouterError:
    text = f"the adapter {name!r} is not registered, as none of its homes loaded it: {_listed(failed)}"
    if all(each.status == 0 for each in failed.values()):
        return NoInstanceError(text, retry_after_s=1.0)
    return InvalidRequestError(text, param="lora_path")
