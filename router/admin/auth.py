"""Keys of the HTTP operation side, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from fastapi import Request
from pydantic import SecretStr

from router.errors import InvalidApiKeyError


def presented_key(request: Request) -> str:
    """The key a request carries: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; "" without any."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "")


def require_key(keys: Sequence[SecretStr], message: str) -> Callable[[Request], None]:
    """A dependency that lets pass who presents one of the keys, or anybody when there are none."""
    known = [key.get_secret_value().encode() for key in keys]

    def check(request: Request) -> None:
        presented = presented_key(request).encode()
        matches = [hmac.compare_digest(presented, key) for key in known]  # all of them: no early exit
        if known and not any(matches):
            raise InvalidApiKeyError(message)

    return check
