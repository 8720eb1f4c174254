"""Keys of the operation API, and who has them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Request

from dualmap.router.admin.exposure import ADVICE, admin_is_exposed
from dualmap.router.admin.web_pages import PageRule
from dualmap.router.errors import AdminClosedError, InvalidApiKeyError, ReadOnlyError
from dualmap.router.http.asgi_bridge import CLIENT_NAME, FROM_GATEWAY
from dualmap.router.settings import RouterSettings
from dualmap.router.tenants.api_keys import presented_key
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.scheduling.tenants.tenant import Caller

REFUSAL: Final = "send the admin key as 'Authorization: Bearer KEY'"
SAID_BY: Final = "x-dualmap-by"
"""The field in which a command says who runs it: that counts where the key does not say it."""
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_LONGEST_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class Admin:
    """A caller of the operation API."""

    name: str
    """The name in the settings; empty where no key is needed, and of ``router.admin_key``, which anyone may have."""
    role: str = "admin"


def admin_finder(
    settings: RouterSettings, tenants: TenantDirectory, advertised_url: str = ""
) -> Callable[[Request], Admin]:
    """A dependency that finds out who calls, and refuses strangers, and changes by those who may only look. Where no
    key is needed, it refuses web pages from elsewhere, and everybody once clients need keys that reach this replica.

    Keys are looked up by their SHA-256, as those of tenants are (``TenantDirectory``).
    """
    known = {each.digest: Admin(each.name, each.role) for each in settings.admins}
    if settings.admin_key is not None:
        known[hashlib.sha256(settings.admin_key.get_secret_value().encode()).digest()] = Admin("")
    pages, is_exposed = PageRule(settings, advertised_url), admin_is_exposed(settings)

    def find_without_keys(request: Request) -> Admin:
        pages.check(request.method, _fields_of(request))
        makes_tenants = request.method not in _READING and request.scope["path"].startswith("/admin/tenants")
        if is_exposed and (tenants.is_closed or makes_tenants):
            raise AdminClosedError(f"tenants have keys, and administration of this replica has none; {ADVICE}")
        request.state.admin = admin = Admin("")
        return admin

    def find(request: Request) -> Admin:
        key = key_of(request)
        admin = known.get(hashlib.sha256(key).digest()) if key else None
        if admin is None:
            raise InvalidApiKeyError(REFUSAL)
        if admin.role == "reader" and request.method not in _READING:
            raise ReadOnlyError(
                f"administrator {admin.name} may only look (role reader, router.admins), not {request.method}"
            )
        request.state.admin = admin
        return admin

    return find if known else find_without_keys


def changed_by(request: Request) -> str:
    """The name under which a change is logged: the administrator's by the key, else that of the client's certificate,
    else the one that the caller claims in a field, with its address."""
    return named_or(request, request.headers.get(SAID_BY, ""))


def named_or(request: Request, claimed: str) -> str:
    """Require an admin, who may have claimed a name elsewhere."""
    admin: Admin = request.state.admin
    known = admin.name or request.scope.get(CLIENT_NAME)
    if known:
        return str(known)[:_LONGEST_NAME]
    said = "".join(char for char in claimed if char.isprintable())[:_LONGEST_NAME]
    address = "" if request.client is None else request.client.host
    return " from ".join(part for part in (f"{said} (unverified)" if said else "", address) if part)


ChangedBy = Annotated[str, Depends(changed_by)]


def key_of(request: Request) -> bytes:
    """The key that a request carries; empty without any."""
    return presented_key(_fields_of(request))


def caller_of(tenants: TenantDirectory, request: Request) -> Caller | None:
    """The tenant that sends the request, and by which key; None where no tenant does. Raises InvalidApiKeyError."""
    if not tenants.is_closed:
        return None
    names = [name for name, _ in request.headers.raw]
    is_gateway = request.scope.get(FROM_GATEWAY, False)
    return tenants.caller(_fields_of(request), from_gateway=is_gateway, count=names.count)


def require_caller(tenants: TenantDirectory) -> Callable[[Request], None]:
    """A dependency that accepts requests of those who may send inference requests."""

    def check(request: Request) -> None:
        caller_of(tenants, request)

    return check


def _fields_of(request: Request) -> Callable[[bytes], bytes | None]:
    """The first field of a name, in the bytes that were sent: Starlette's own view decodes them as Latin-1."""
    return dict(reversed(request.headers.raw)).get
