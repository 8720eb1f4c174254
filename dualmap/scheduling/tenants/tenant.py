"""A tenant: one of the teams that share a fleet, and what it may use."""

from __future__ import annotations

from dataclasses import KW_ONLY, field
from typing import Any

from msgspec.structs import force_setattr

from dualmap.scheduling.tenants.budgets import OF_MODEL, Limit, Measure
from dualmap.scheduling.values import value


@value
class Tenant:
    name: str
    limits: tuple[Limit, ...] = ()
    models: frozenset[str] = field(default_factory=frozenset)
    """The models that it may use, by any of their names; empty: all."""
    pools: frozenset[str] = field(default_factory=frozenset)
    """The pools that it may use; empty: all."""
    priority_class: str = ""
    """The highest class that its requests may have, and the one they have unless they say otherwise; empty: none."""
    weight: float = 1.0
    """The share of the work beside other tenants, relative to theirs; above 0."""
    _: KW_ONLY
    shares_cache: bool = False
    """Requests may find what others left in KV caches, also where those of tenants are kept apart."""
    adapter_paths: tuple[str, ...] = ()
    """The folders from which it may load adapters of its own; empty: it may not."""
    max_adapters: int = 0
    """The adapters that it may have registered in a pool."""
    limits_models: bool = False
    """Some of its limits are for models. Computed from the limits, as every request needs it."""
    limits_tokens: bool = False
    """Some of its limits count tokens. Computed likewise."""
    draws_asked: bool = False
    """Requests draw from limits on tokens all that they ask for, not what their answers are expected to have."""

    def __post_init__(self) -> None:
        made: Any = self
        force_setattr(made, "limits_models", any(limit.of.startswith(OF_MODEL) for limit in self.limits))
        force_setattr(made, "limits_tokens", any(limit.measure is not Measure.REQUESTS for limit in self.limits))


@value
class Caller:
    """The sender of a request: a tenant, by one of its keys."""

    tenant: Tenant
    key: str
    """The name of the key, never the key itself."""
    digest: bytes = b""
    """SHA-256 of the key, to find out whether it was revoked; not to be shown, as a key that is no random one could be
    guessed by it. Empty for who came without a key."""
    priority_class: str = ""
    """The class that a token or the gateway names, within the tenant's; empty: the tenant's own."""
