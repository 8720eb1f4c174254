"""Keys of the operation API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import Request
from pydantic import SecretStr

from dualmap.router.tenants.api_keys import API_KEY_REFUSAL, ApiKeys, presented_key
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.scheduling.tenants.tenant import Caller


def key_of(request: Request) -> bytes:
    """The key that a request carries; empty without any."""
    return presented_key(_fields_of(request))


def require_key(keys: Sequence[SecretStr], refusal: str = API_KEY_REFUSAL) -> Callable[[Request], None]:
    """A dependency that accepts requests with one of the keys, or all requests when there are none."""
    known = ApiKeys((key.get_secret_value() for key in keys), refusal=refusal)

    def check(request: Request) -> None:
        known.check(_fields_of(request))

    return check


def caller_of(tenants: TenantDirectory, request: Request) -> Caller | None:
    """Who sends the request; None where no tenant does. Raises InvalidApiKeyError."""
    return tenants.caller(_fields_of(request)) if tenants else None


def require_caller(tenants: TenantDirectory) -> Callable[[Request], None]:
    """A dependency that accepts requests of those who may send inference requests."""

    def check(request: Request) -> None:
        tenants.caller(_fields_of(request))

    return check


def _fields_of(request: Request) -> Callable[[bytes], bytes | None]:
    """The first field of a name, in the bytes that were sent: Starlette's own view decodes them as Latin-1."""
    return dict(reversed(request.headers.raw)).get
