"""The tenants that a replica knows, by the hashes of their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from dualmap.router.errors import InvalidApiKeyError, TenantHeaderError, UnknownTenantError, unknown_model
from dualmap.router.settings import GatewaySettings
from dualmap.router.tenants.api_keys import API_KEY_REFUSAL, ApiKeys, presented_key
from dualmap.router.tenants.signed_tokens import Tokens, is_token
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.scheduling.tenants.tenant import Caller, Tenant

TOKEN: Final = "(token)"
GATEWAY: Final = "(gateway)"
"""These stand for the name of a key where a tenant was named otherwise: no key has such a name."""
_BEARER: Final = b"Bearer "


class TenantDirectory:
    """Says who sends a request. Keys of tenants, and keys that belong to no tenant (``router.api_keys``), give access;
    without any key, access is open, unless it is said to need one.

    A key is looked up by its SHA-256. The time that this takes tells nothing of another key: a client that tries keys
    does not know, and cannot choose, the hash of one that is near to a right one. No dump of the memory shows a key
    either.
    """

    def __init__(
        self,
        api_keys: Iterable[str],
        tenants: Sequence[TenantSettings] = (),
        *,
        needs_key: bool = False,
        tokens: Tokens | None = None,
        gateway: GatewaySettings | None = None,
    ) -> None:
        """``tokens`` are those that clients may send in place of keys; ``gateway`` is the one that names tenants."""
        self._tokens = tokens
        self._gateway = None if gateway is None else gateway.tenant_header.encode()
        self._class_field = None if gateway is None or gateway.class_header is None else gateway.class_header.encode()
        self._api_keys = ApiKeys(api_keys)
        self._callers: dict[bytes, Caller] = {}
        self.tenants: dict[str, Tenant] = {}
        """All, by name."""
        self.configured = {settings.name: settings for settings in tenants}
        """The tenants of the settings, by name, which stay as long as the replica runs."""
        self._keys_of: dict[str, tuple[bytes, ...]] = {}
        """The keys of each tenant, the latest of a name last."""
        for settings in tenants:
            tenant = settings.tenant()
            self.tenants[settings.name] = tenant
            for key in settings.keys:
                digest = bytes.fromhex(key.hash)
                self._callers[digest] = Caller(tenant, key.name, digest)
            self._keys_of[settings.name] = tuple([bytes.fromhex(key.hash) for key in settings.keys])
        known = bool(self._api_keys) or bool(self._callers)
        self.is_closed = needs_key or known or tokens is not None or gateway is not None
        """Whether access needs a key."""

    def __bool__(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        """Access needs a key from now on."""
        self.is_closed = True

    @property
    def has_tenants(self) -> bool:
        """Whether there are any."""
        return bool(self.tenants)

    def caller(
        self,
        field: Callable[[bytes], bytes | None],
        *,
        from_gateway: bool = False,
        count: Callable[[bytes], int] | None = None,
    ) -> Caller | None:
        """The sender of a request with these fields; None where it is no tenant. ``from_gateway``: over a connection of
        the gateway, which is believed. ``count`` says how often a field was sent; None: once at most.

        Raises:
            InvalidApiKeyError: keys are needed, and none that is known was sent.
            RouterError: a token is not to be trusted, or names no tenant that there is; or a client claims to be one.
        """
        if self._gateway is not None and (named := field(self._gateway)) is not None:
            if not from_gateway:
                raise TenantHeaderError(
                    f"{self._gateway.decode()} is believed of the gateway alone (router.gateway): leave it out, and "
                    "send the tenant's key"
                )
            return self._named_by_gateway(named, field, count)
        if self._callers or self._tokens is not None:
            key = presented_key(field)
            caller = self._known_by(key)
            if caller is not None:
                return caller
            if self._tokens is not None and is_token(key) and not self._api_keys.knows(key):
                claims = self._tokens.claims(key)
                return Caller(self._tenant(claims.tenant, "the token"), TOKEN, b"", claims.priority_class)
        if self._api_keys:
            self._api_keys.check(field)
        elif self.is_closed:
            raise InvalidApiKeyError(API_KEY_REFUSAL)
        return None

    def by_key(self, field: Callable[[bytes], bytes | None]) -> Caller | None:
        """The owner of the key that a request with these fields sends in the usual form, where no gateway names
        tenants; None: ``caller`` says who sends it."""
        sent = field(b"authorization")
        if sent is None or self._gateway is not None:
            return None
        before, _, key = sent.partition(_BEARER)
        return None if before or not key else self._callers.get(sha256(key).digest())

    def _known_by(self, key: bytes) -> Caller | None:
        """The owner of the key. The empty key, which a request without one has, is no tenant's, even if it was set."""
        return self._callers.get(sha256(key).digest()) if key else None

    def _named_by_gateway(
        self, named: bytes, field: Callable[[bytes], bytes | None], count: Callable[[bytes], int] | None
    ) -> Caller:
        name = (self._gateway or b"").decode()
        for each in (self._gateway, self._class_field):
            if count is not None and each is not None and count(each) > 1:
                raise TenantHeaderError(
                    f"{each.decode()} was sent more than once: the gateway must replace what its own clients send"
                )
        tenant = self._tenant(named.decode("latin-1"), name)
        by_key = self._known_by(presented_key(field))
        if by_key is not None and by_key.tenant.name != tenant.name:
            raise TenantHeaderError(f"{name} names another tenant than the one whose key is sent; send one of the two")
        klass = None if self._class_field is None else field(self._class_field)
        return Caller(tenant, GATEWAY, b"", "" if klass is None else klass.decode("latin-1"))

    def _tenant(self, name: str, said_by: str) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            raise UnknownTenantError(f"{said_by} names tenant {name[:64]!r}, which is not known here; make it first")
        return tenant

    def is_known(self, caller: Caller) -> bool:
        """Whether the key of a former request still gives access."""
        return caller.digest in self._callers if caller.digest else caller.tenant.name in self.tenants

    def by_name(self, tenant: str, key: str) -> Caller | None:
        """The caller by a key of this name, as it is now; None: the tenant has none."""
        for digest in reversed(self._keys_of.get(tenant, ())):
            if (caller := self._callers[digest]).key == key:
                return caller
        return None

    def owner(self, digest: bytes) -> str | None:
        """The tenant that has the key; None: no tenant."""
        caller = self._callers.get(digest)
        return None if caller is None else caller.tenant.name

    def put(self, name: str, record: TenantRecord, is_valid: Callable[[KeyRecord], bool]) -> bool:
        """Enter a tenant of the running fleet as it is now. One of the settings is not replaced, nor is a key that
        another tenant has: False where that kept one out."""
        if name in self.configured:
            return True
        self._forget_keys(name)
        tenant = self.tenants[name] = record.as_tenant(name)
        digests, is_whole = [], True
        for key in record.keys:
            if not is_valid(key):
                continue
            if key.digest in self._callers:
                is_whole = False
                continue
            self._callers[key.digest] = Caller(tenant, key.name, key.digest)
            digests.append(key.digest)
        self._keys_of[name] = tuple(digests)
        return is_whole

    def remove(self, name: str) -> None:
        """Forget a tenant of the running fleet."""
        if name not in self.configured:
            self._forget_keys(name)
            self.tenants.pop(name, None)

    def _forget_keys(self, name: str) -> None:
        for digest in self._keys_of.pop(name, ()):
            self._callers.pop(digest, None)


def usable_models(caller: Caller | None, listed: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer of ``GET /v1/models`` with the models alone that the caller may use; a card has the tenant that owns
    the adapter, if one does."""
    if caller is None:
        return listed
    tenant = caller.tenant
    cards = [card for card in listed["data"] if may_use(tenant, card["id"], card["pool"], card["tenant"])]
    return {**listed, "data": cards}


def usable_model(caller: Caller | None, listed: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """The answer of ``GET /v1/models/MODEL``. Raises UnknownModelError where the caller may use no such model."""
    for card in usable_models(caller, listed)["data"]:
        if card["id"] == model:
            found: Mapping[str, Any] = card
            return found
    raise unknown_model(model)


def may_use(tenant: Tenant, model: str, pool: str, owner: str) -> bool:
    """Whether a tenant may use a model of a pool. An adapter with an owner is its owner's alone, whatever models that
    one may use besides."""
    if tenant.pools and pool not in tenant.pools:
        return False
    return owner == tenant.name if owner else not tenant.models or model in tenant.models


def check_model(caller: Caller, sent: str, route_model: str, pool: str, owner: str = "") -> None:
    """Raises UnknownModelError where the tenant may not use a model, or its pool: to it, there is no such model.

    ``sent``: the name that the request has, if any; ``route_model`` is the one that it stands for without a name.
    """
    if not may_use(caller.tenant, sent or route_model, pool, owner):
        raise unknown_model(sent)
