"""The tenants that a replica knows, by the hashes of their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from dualmap.router.errors import InvalidApiKeyError, UnknownModelError
from dualmap.router.tenants.api_keys import API_KEY_REFUSAL, ApiKeys, presented_key
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.scheduling.tenants.tenant import Caller, Tenant


class TenantDirectory:
    """Says who sends a request. Keys of tenants, and keys that belong to no tenant (``router.api_keys``), give access;
    without any key, access is open, unless it is said to need one.

    A key is looked up by its SHA-256. How long that takes tells nobody anything of another key: who tries keys does not
    know, and cannot choose, the hash of one that is near to a right one. No dump of the memory shows a key either.
    """

    def __init__(
        self, api_keys: Iterable[str], tenants: Sequence[TenantSettings] = (), *, needs_key: bool = False
    ) -> None:
        self._api_keys = ApiKeys(api_keys)
        self._callers: dict[bytes, Caller] = {}
        self.tenants: dict[str, Tenant] = {}
        """All, by name."""
        self.configured = {settings.name: settings for settings in tenants}
        """Those of the settings, by name, which stay as long as the replica runs."""
        self._keys_of: dict[str, tuple[bytes, ...]] = {}
        """The keys of each tenant that was made in the running fleet."""
        for settings in tenants:
            tenant = settings.tenant()
            self.tenants[settings.name] = tenant
            for key in settings.keys:
                digest = bytes.fromhex(key.hash)
                self._callers[digest] = Caller(tenant, key.name, digest)
        self.is_closed = needs_key or bool(self._api_keys) or bool(self._callers)
        """Whether access needs a key."""

    def __bool__(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        """Access needs a key from now on."""
        self.is_closed = True

    def caller(self, field: Callable[[bytes], bytes | None]) -> Caller | None:
        """Who sends a request with these fields; None where no tenant does.

        Raises:
            InvalidApiKeyError: keys are needed, and none that is known was sent.
        """
        if self._callers:
            caller = self._callers.get(hashlib.sha256(presented_key(field)).digest())
            if caller is not None:
                return caller
        if self._api_keys:
            self._api_keys.check(field)
        elif self.is_closed:
            raise InvalidApiKeyError(API_KEY_REFUSAL)
        return None

    def is_known(self, caller: Caller) -> bool:
        """Whether the key of a former request still gives access."""
        return caller.digest in self._callers

    def owner(self, digest: bytes) -> str | None:
        """The tenant that has the key; None: nobody."""
        caller = self._callers.get(digest)
        return None if caller is None else caller.tenant.name

    def put(self, name: str, record: TenantRecord, is_valid: Callable[[KeyRecord], bool]) -> None:
        """Enter a tenant of the running fleet as it is now. One of the settings is not replaced, nor is a key that
        another tenant has."""
        if name in self.configured:
            return
        self._forget_keys(name)
        tenant = self.tenants[name] = record.as_tenant(name)
        digests = []
        for key in record.keys:
            if is_valid(key) and key.digest not in self._callers:
                self._callers[key.digest] = Caller(tenant, key.name, key.digest)
                digests.append(key.digest)
        self._keys_of[name] = tuple(digests)

    def remove(self, name: str) -> None:
        """Forget a tenant of the running fleet."""
        if name not in self.configured:
            self._forget_keys(name)
            self.tenants.pop(name, None)

    def _forget_keys(self, name: str) -> None:
        for digest in self._keys_of.pop(name, ()):
            self._callers.pop(digest, None)


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
