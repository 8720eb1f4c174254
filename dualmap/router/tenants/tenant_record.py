"""A tenant that was made in the running fleet, as the store keeps it. Keys are kept as hashes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dualmap.runtime.tenant_settings import LimitSettings, Name, TenantFields
from dualmap.scheduling.tenants.tenant import Tenant

_KNOWN_LIMITS = frozenset(LimitSettings.model_fields)


class KeyRecord(BaseModel):
    """One key."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Name
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    limits: LimitSettings = LimitSettings()
    created_ms: int = 0
    expires_ms: int | None = None
    """The time at which it ends, by the store's clock; None: it does not end by itself."""

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


class TenantRecord(TenantFields):
    """One tenant. A newer version writes fields beside these, which are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    keys: tuple[KeyRecord, ...] = ()
    """Two may have one name: a key that was rotated goes on for a while."""
    created_ms: int = 0
    revision: int = 0
    """The edition of the book that it was last changed in."""

    @classmethod
    def parse(cls, text: bytes) -> TenantRecord:
        """Raises ValueError where it cannot be read."""
        with contextlib.suppress(ValidationError):
            return cls.model_validate_json(text)
        try:
            values = orjson.loads(text)
            known = {
                "limits": _known(values.get("limits", {})),
                "model_limits": {model: _known(each) for model, each in values.get("model_limits", {}).items()},
                "keys": [key | {"limits": _known(key.get("limits", {}))} for key in values.get("keys", ())],
            }
            return cls.model_validate(values | known)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"no tenant: {error}") from error

    def text(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json", exclude_defaults=True))

    def as_tenant(self, name: str) -> Tenant:
        return self.tenant_named(name, {key.name: key.limits for key in self.keys if key.limits.model_fields_set})

    def keys_named(self, name: str) -> Sequence[KeyRecord]:
        return [key for key in self.keys if key.name == name]

    def described(self) -> dict[str, Any]:
        """The tenant as people may see it: without the hashes of keys."""
        shown = self.model_dump(mode="json", exclude={"keys", "limits", "model_limits"})
        keys = [key.model_dump(mode="json", exclude={"sha256", "limits"}) | _limits(key.limits) for key in self.keys]
        limits = {model: each.model_dump(exclude_none=True) for model, each in self.model_limits.items()}
        return shown | _limits(self.limits) | {"model_limits": limits, "keys": keys}


def _limits(limits: LimitSettings) -> dict[str, Any]:
    return {"limits": limits.model_dump(exclude_none=True)}


def _known(limits: Mapping[str, Any]) -> dict[str, Any]:
    return {name: amount for name, amount in limits.items() if name in _KNOWN_LIMITS}
