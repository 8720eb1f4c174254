"""Tenants that are made while the fleet runs, and the log of who changed what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import ChangedBy
from dualmap.router.admin.scope import RuntimeParam
from dualmap.router.errors import ConflictError, InvalidRequestError, NotFoundError
from dualmap.router.replica.runtime import Runtime
from dualmap.router.settings import not_finite
from dualmap.router.tenants.administration import TenantAdministration, checked, found, hash_of, new_key
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.complaints import in_words
from dualmap.runtime.tenant_settings import LimitSettings, Name, TenantFields, TenantSettings
from dualmap.statestore.tenants.tenant_book import LOGGED_CHANGES

routes = APIRouter(prefix="/admin", tags=["tenants"])
MAX_LISTED = 1000

TenantName = Annotated[str, Path(description="name of the tenant")]
KeyName = Annotated[str, Path(description="name of the key")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class NewKey(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name = Field(description="name of the key, in logs and limits")
    limits: LimitSettings = Field(LimitSettings(), description="limits of this key alone")
    sha256: Sha256 | None = Field(None, description="SHA-256 of a key that you made; left out: one is made")


class NewTenant(TenantFields):
    name: Name = Field(description="letters, digits, '_', '-' and '.', 64 at most")
    keys: tuple[NewKey, ...] = Field((), description="its first keys")


class TenantChanges(BaseModel):
    """Fields to change; what is left out stays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limits: dict[str, Any] | None = Field(None, description="limits to change by name; null: no such limit any more")
    model_limits: dict[str, dict[str, Any] | None] | None = Field(
        None, description="the same for single models; null: no limits for the model any more"
    )
    models: tuple[str, ...] | None = Field(None, description="models that it may use; empty: all")
    pools: tuple[str, ...] | None = Field(None, description="pools that it may use; empty: all")
    adapter_paths: tuple[str, ...] | None = Field(
        None, description="folders from which it may load LoRA adapters of its own; empty: none"
    )
    max_adapters: int | None = Field(None, description="LoRA adapters that it may have registered in each pool")
    priority_class: str | None = Field(None, description="highest priority class of its requests; empty: none")
    weight: float | None = Field(None, description="share of the work, relative to other tenants' weights")
    shares_cache: bool | None = Field(None, description="share the KV caches of those without a tenant")
    draws: Literal["expected", "asked"] | None = Field(
        None,
        description="what a request takes of limits on tokens until it is over: expected answers, or all it asks for",
    )
    revision: int | None = Field(None, description="change it only if it is still of this revision")


class Rotation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep_old_s: float = Field(
        0.0, ge=0, le=365 * 86_400, description="time for which the former key goes on giving access, seconds"
    )
    sha256: Sha256 | None = Field(None, description="SHA-256 of a key that you made; left out: one is made")


class Tenant(BaseModel):
    """A tenant. No key is ever shown but in the answer to the call that made it."""

    name: str
    source: str = Field(description="`settings`: of the settings file, and changed there; `store`: made here")
    weight: float
    priority_class: str | None
    shares_cache: bool
    draws: str
    limits: dict[str, int]
    model_limits: dict[str, dict[str, int]]
    models: list[str]
    pools: list[str]
    adapter_paths: list[str]
    max_adapters: int
    keys: list[dict[str, Any]]
    revision: int | None = Field(None, description="grows with every change; null for one of the settings")
    created_ms: int | None = None


class MadeKey(BaseModel):
    """A key, shown this once."""

    tenant: str
    name: str
    key: str | None = Field(description="the key; null where you gave its hash")


class MadeTenant(BaseModel):
    tenant: Tenant
    keys: list[MadeKey]


class TenantList(BaseModel):
    tenants: list[Tenant]
    next: str | None = Field(None, description="list on with `after=` this name; null: these were the last ones")


class AuditEntry(BaseModel):
    """A change: before and after it, what differs, without keys."""

    at_ms: int
    by: str
    action: str
    tenants: list[str]
    before: dict[str, Any]
    after: dict[str, Any]


@routes.get("/tenants")
async def list_tenants(
    runtime: RuntimeParam,
    after: Annotated[str, Query(description="list those behind this name")] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="tenants at most")] = 100,
) -> TenantList:
    """Every tenant with limits and names of keys, by name; of the settings, and of the running fleet."""
    await runtime.tenant_keeper.refresh()
    names = sorted({*runtime.tenants.configured, *runtime.tenant_keeper.records})
    listed = [name for name in names if name > after]
    shown = [_shown(runtime, name) for name in listed[:limit]]
    return TenantList(tenants=shown, next=shown[-1].name if len(listed) > limit else None)


@routes.post("/tenants", status_code=201)
async def create_tenant(runtime: RuntimeParam, wanted: NewTenant, by: ChangedBy) -> MadeTenant:
    """Make a tenant, with keys, which the answer shows and nothing afterwards. In force on every router and picker
    within a second."""
    administration, now_ms = _administration(runtime), await runtime.tenant_keeper.book.now_ms()
    made = [_made(wanted.name, key.name, key.sha256) for key in wanted.keys]
    if len({key.name for key in wanted.keys}) < len(wanted.keys):
        raise InvalidRequestError("two of its keys have one name", param="keys")
    _check(runtime, wanted)
    fields = _fields_of(wanted)
    keys = tuple(
        KeyRecord(name=key.name, sha256=digest, limits=key.limits, created_ms=now_ms)
        for key, (_, digest) in zip(wanted.keys, made, strict=True)
    )

    def create(known: TenantRecord | None) -> TenantRecord:
        if known is not None:
            raise ConflictError(
                f"there is a tenant {wanted.name!r} already; change it by PATCH, or with: dualmap tenants set"
                f" {wanted.name} NAME=VALUE",
                param="name",
            )
        for key in keys:
            administration.refuse_taken(key.sha256)
        return checked(TenantRecord(**fields, keys=keys, created_ms=now_ms))

    await administration.change(wanted.name, create, by=by, action="create")
    return MadeTenant(tenant=_shown(runtime, wanted.name), keys=[key for key, _ in made])


@routes.get("/audit")
async def audit(
    runtime: RuntimeParam,
    tenant: Annotated[str | None, Query(description="changes of this one alone")] = None,
    limit: Annotated[int, Query(ge=1, le=LOGGED_CHANGES, description="changes at most")] = 100,
) -> list[AuditEntry]:
    """The last changes of tenants, the latest first: when, by whom, from what, to what. The last 10,000 are kept."""
    changes = await runtime.tenant_keeper.book.history(limit if tenant is None else LOGGED_CHANGES)
    of_it = [each for each in changes if tenant is None or tenant in each.tenants][:limit]
    return [AuditEntry.model_validate(each, from_attributes=True) for each in of_it]


@routes.get("/tenants/{name}")
async def one_tenant(runtime: RuntimeParam, name: TenantName) -> Tenant:
    """One tenant."""
    await runtime.tenant_keeper.refresh()
    return _shown(runtime, name)


@routes.patch("/tenants/{name}")
async def change_tenant(runtime: RuntimeParam, name: TenantName, wanted: TenantChanges, by: ChangedBy) -> Tenant:
    """Change limits, models, pools, weight or class. A limit that is lowered below what runs lets that finish, and
    admits nothing until there is room under it."""

    def change(known: TenantRecord | None) -> TenantRecord:
        record = found(known, name)
        if wanted.revision is not None and wanted.revision != record.revision:
            raise ConflictError(
                f"tenant {name!r} is of revision {record.revision} by now: look at it again", param="revision"
            )
        return _changed(runtime, record, wanted)

    await _administration(runtime).change(name, change, by=by, action="set")
    return _shown(runtime, name)


@routes.delete("/tenants/{name}", status_code=204)
async def remove_tenant(runtime: RuntimeParam, name: TenantName, by: ChangedBy) -> None:
    """Remove a tenant with all keys. What it used of quotas stays counted, should it be made again."""

    def remove(known: TenantRecord | None) -> None:
        found(known, name)

    await _administration(runtime).change(name, remove, by=by, action="remove")


@routes.post("/tenants/{name}/keys", status_code=201)
async def create_key(runtime: RuntimeParam, name: TenantName, wanted: NewKey, by: ChangedBy) -> MadeKey:
    """Make a further key, which the answer shows and nothing afterwards."""
    administration, now_ms = _administration(runtime), await runtime.tenant_keeper.book.now_ms()
    made, digest = _made(name, wanted.name, wanted.sha256)

    def create(known: TenantRecord | None) -> TenantRecord:
        record = _with_live_keys(runtime, found(known, name))
        for key in record.keys_named(wanted.name):
            if (key.sha256, key.limits, key.expires_ms) == (digest, wanted.limits, None):
                return record  # it was made before, and the answer was lost
            raise ConflictError(f"tenant {name!r} has a key {wanted.name!r} already; rotate it", param="name")
        administration.refuse_taken(digest)
        key = KeyRecord(name=wanted.name, sha256=digest, limits=wanted.limits, created_ms=now_ms)
        return checked(record.model_copy(update={"keys": (*record.keys, key)}))

    await administration.change(name, create, by=by, action="create key")
    return made


@routes.post("/tenants/{name}/keys/{key}/rotate")
async def rotate_key(runtime: RuntimeParam, name: TenantName, key: KeyName, wanted: Rotation, by: ChangedBy) -> MadeKey:
    """Replace a key by a new one of the same name and limits, which the answer shows and nothing afterwards. The former
    one ends at once, or after `keep_old_s`."""
    administration, now_ms = _administration(runtime), await runtime.tenant_keeper.book.now_ms()
    made, digest = _made(name, key, wanted.sha256)

    def rotate(known: TenantRecord | None) -> TenantRecord:
        record = _with_live_keys(runtime, found(known, name))
        former = [each for each in record.keys_named(key) if each.expires_ms is None]
        if not former:
            raise _no_key(name, key)
        if former[0].sha256 == digest:
            return record
        administration.refuse_taken(digest)
        ends_ms = now_ms + round(wanted.keep_old_s * 1000)
        kept = [former[0].model_copy(update={"expires_ms": ends_ms})] if wanted.keep_old_s else []
        others = [each for each in record.keys if each.name != key]
        new = KeyRecord(name=key, sha256=digest, limits=former[0].limits, created_ms=now_ms)
        return checked(record.model_copy(update={"keys": (*others, *kept, new)}))

    await administration.change(name, rotate, by=by, action="rotate key")
    return made


@routes.delete("/tenants/{name}/keys/{key}", status_code=204)
async def revoke_key(runtime: RuntimeParam, name: TenantName, key: KeyName, by: ChangedBy) -> None:
    """Revoke a key, and a former one of its name that still gives access. Requests under way finish, or end, as
    `router.revoked_requests` says."""

    def revoke(known: TenantRecord | None) -> TenantRecord:
        record = found(known, name)
        if not record.keys_named(key):
            raise _no_key(name, key)
        kept = tuple(each for each in record.keys if each.name != key)
        return record.model_copy(update={"keys": kept})

    await _administration(runtime).change(name, revoke, by=by, action="revoke key")


def _administration(runtime: Runtime) -> TenantAdministration:
    return TenantAdministration(runtime.tenant_keeper)


def _made(tenant: str, name: str, sha256: str | None) -> tuple[MadeKey, str]:
    """A key for the answer, and its hash."""
    key = new_key() if sha256 is None else None
    return MadeKey(tenant=tenant, name=name, key=key), hash_of(key) if key is not None else sha256 or ""


def _no_key(tenant: str, key: str) -> NotFoundError:
    return NotFoundError(f"tenant {tenant!r} has no key {key!r}", param="key")


def _with_live_keys(runtime: Runtime, record: TenantRecord) -> TenantRecord:
    """The tenant without the keys that have ended."""
    live = tuple(key for key in record.keys if runtime.tenant_keeper.is_valid(key))
    return record if live == record.keys else record.model_copy(update={"keys": live})


def _changed(runtime: Runtime, record: TenantRecord, wanted: TenantChanges) -> TenantRecord:
    """Raises InvalidRequestError: a value is wrong."""
    fields = _fields_of(record)
    given = wanted.model_dump(exclude_none=True, exclude={"revision", "limits", "model_limits"})
    if given.get("priority_class") == "":
        given["priority_class"] = None
    fields |= given
    try:
        if wanted.limits is not None:
            fields["limits"] = _merged(record.limits, wanted.limits)
        if wanted.model_limits is not None:
            fields["model_limits"] = dict(record.model_limits)
            for model, changes in wanted.model_limits.items():
                if changes is None:
                    fields["model_limits"].pop(model, None)
                else:
                    fields["model_limits"][model] = _merged(record.model_limits.get(model, LimitSettings()), changes)
        checked_fields = TenantFields.model_validate(fields)
    except ValueError as error:
        raise _wrong_value(error) from error
    _check(runtime, checked_fields)
    return record.model_copy(update=_fields_of(checked_fields))


def _fields_of(tenant: TenantFields) -> dict[str, Any]:
    """The fields that every tenant has, wherever it was made."""
    return {name: getattr(tenant, name) for name in TenantFields.model_fields}


def _merged(limits: LimitSettings, changes: dict[str, Any]) -> LimitSettings:
    return LimitSettings.model_validate({**limits.model_dump(), **changes})


_NAMES = (*TenantFields.model_fields, *LimitSettings.model_fields)


def _wrong_value(error: ValueError) -> InvalidRequestError:
    """The first of pydantic's complaints."""
    errors: Sequence[Any] = error.errors() if hasattr(error, "errors") else ()
    if not errors:
        return InvalidRequestError(str(error))
    where = ".".join(map(str, errors[0]["loc"]))
    return InvalidRequestError(f"{where}: {in_words(errors[0], _NAMES)}", param=where)


def _check(runtime: Runtime, fields: TenantFields) -> None:
    """Raises InvalidRequestError: a number is infinite, or there is no such pool."""
    for name in not_finite(fields):
        raise InvalidRequestError(f"{name} must be finite", param=name)
    if unknown := sorted(set(fields.pools) - runtime.pools.pools.keys()):
        known = ", ".join(runtime.pools.pools)
        raise InvalidRequestError(f"there is no pool {unknown[0]!r}; there are: {known}", param="pools")


def _shown(runtime: Runtime, name: str) -> Tenant:
    """Raises NotFoundError."""
    if (settings := runtime.tenants.configured.get(name)) is not None:
        return _shown_settings(settings)
    record = runtime.tenant_keeper.records.get(name)
    if record is None:
        raise NotFoundError(f"there is no tenant {name!r}", param="name")
    return Tenant(name=name, source="store", **_with_live_keys(runtime, record).described())


def _shown_settings(settings: TenantSettings) -> Tenant:
    described = TenantRecord(**_fields_of(settings)).described()
    keys = [{"name": key.name, "limits": key.limits.model_dump(exclude_none=True)} for key in settings.keys]
    named = described | {"keys": keys, "revision": None, "created_ms": None}
    return Tenant(name=settings.name, source="settings", **named)
