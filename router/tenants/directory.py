"""The tenants that a replica knows, by the hashes of their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from dualmap.router.errors import InvalidApiKeyError, UnknownModelError
from dualmap.router.tenants.api_keys import API_KEY_REFUSAL, ApiKeys, presented_key
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.scheduling.tenants.tenant import Caller


class TenantDirectory:
    """Says who sends a request. Keys of tenants, and keys that belong to no tenant (``router.api_keys``), give access;
    without any key, access is open.

    Keys are looked up by their hash, so neither the time that a refusal takes nor a dump of the memory shows one.
    """

    def __init__(self, api_keys: Iterable[str], tenants: Sequence[TenantSettings] = ()) -> None:
        self._api_keys = ApiKeys(api_keys)
        self._callers = _callers(tenants)

    def __bool__(self) -> bool:
        return bool(self._api_keys) or bool(self._callers)

    def caller(self, field: Callable[[bytes], bytes | None]) -> Caller | None:
        """Who sends a request with these fields; None where no tenant does.

        Raises:
            InvalidApiKeyError: keys are needed, and none that is known was sent.
        """
        if self._callers:
            caller = self._callers.get(hashlib.sha256(presented_key(field)).digest())
            if caller is not None:
                return caller
            if not self._api_keys:
                raise InvalidApiKeyError(API_KEY_REFUSAL)
        self._api_keys.check(field)
        return None


def check_model(caller: Caller, model: str, pool: str) -> None:
    """Raises UnknownModelError where the tenant may not use the model, or its pool: to it, there is no such model."""
    tenant = caller.tenant
    if tenant.models and model not in tenant.models:
        may = ", ".join(sorted(tenant.models))
        raise UnknownModelError(f"tenant {tenant.name} may not use the model {model!r}, but {may}")
    if tenant.pools and pool not in tenant.pools:
        may = ", ".join(sorted(tenant.pools))
        raise UnknownModelError(
            f"tenant {tenant.name} may not use the model {model!r}: it is of pool {pool!r}, and the tenant's are {may}"
        )


def _callers(tenants: Sequence[TenantSettings]) -> Mapping[bytes, Caller]:
    return {
        bytes.fromhex(key.hash): Caller(tenant, key.name)
        for settings, tenant in ((each, each.tenant()) for each in tenants)
        for key in settings.keys
    }
