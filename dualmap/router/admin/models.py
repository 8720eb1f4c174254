"""Model names: which there are, who serves them, and those that no instance lists: add and remove."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.scope import RuntimeParam, pool_of
from dualmap.router.errors import ConflictError, NotFoundError
from dualmap.router.replica.runtime import Runtime

routes = APIRouter(prefix="/admin/models", tags=["models"])

Source = Literal["configured", "added", "listed"]


class NewModelName(BaseModel):
    """A name that instances serve without listing it, such as an adapter that an engine loads when it is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=512, description="the name that clients use")
    kind: Literal["lora", "alias"] = Field(
        "lora",
        description="lora: an adapter, which instances know by this name; alias: another name of the pool's model",
    )
    pool: str | None = Field(None, description="pool that serves it; may be left out when there is one pool")


class ModelName(BaseModel):
    """A name, and who serves it."""

    name: str
    pool: str
    kind: Literal["model", "alias", "lora"]
    source: Source
    sent_as: str = Field(description="the name in requests to instances")
    instances: list[str] = Field(description="ids of the instances that list that name, in any state")
    also_in: list[str] = Field([], description="other pools whose instances list it: a setting chooses between them")


class ModelNames(BaseModel):
    models: list[ModelName]


@routes.get("")
async def list_models(runtime: RuntimeParam) -> ModelNames:
    """Every model name of all pools: configured, added here, or listed by instances."""
    return ModelNames(models=[_described(runtime, name) for name in sorted(runtime.pools.routes) if name])


@routes.post("", status_code=201)
async def add_model(runtime: RuntimeParam, wanted: NewModelName) -> ModelName:
    """Serve a further name, on all replicas. It goes to the instances that list it; where none does, to any, and the
    engine judges."""
    pool = pool_of(runtime, wanted.pool)
    taken, source = runtime.pools.routes.get(wanted.name), runtime.pools.source_of(wanted.name)
    if taken is not None and source != "listed" and (source == "configured" or taken.pool is not pool):
        raise ConflictError(
            f"pool {taken.pool.settings.name!r} has the model name {wanted.name!r} already ({source})", param="name"
        )
    await pool.store.members.add_name(wanted.name, "lora" if wanted.kind == "lora" else "")
    await pool.view.refresh()
    return _described(runtime, wanted.name)


@routes.delete("/{name:path}", status_code=204)
async def remove_model(
    runtime: RuntimeParam, name: Annotated[str, Path(description="a name that was added here")]
) -> None:
    """Serve an added name no more. A name that instances list is served as long as they list it."""
    source = runtime.pools.source_of(name)
    removed = False
    for pool in runtime.pools.pools.values():
        if name in (await pool.store.membership()).names:
            removed = await pool.store.members.remove_name(name) or removed
            await pool.view.refresh()
    if removed:
        return
    if source == "listed":
        instances = ", ".join(_described(runtime, name).instances)
        raise ConflictError(f"the name {name!r} is listed by {instances}: unload it there", param="name")
    if source == "configured":
        raise ConflictError(f"the name {name!r} is configured: change the settings of its pool", param="name")
    raise NotFoundError(f"no model name {name!r} was added", param="name")


def _described(runtime: Runtime, name: str) -> ModelName:
    route = runtime.pools.resolve(name)
    settings, instances = route.pool.settings, route.pool.view.view.instances
    others = runtime.pools.contested.get(name, (settings.name,))
    return ModelName(
        name=name,
        pool=settings.name,
        kind="lora" if route.lora else "alias" if name != settings.model else "model",
        source=runtime.pools.source_of(name),
        sent_as=route.model,
        instances=[instance_id for instance_id, spec in instances.items() if spec.lists(route.model)],
        also_in=[each for each in others if each != settings.name],
    )
