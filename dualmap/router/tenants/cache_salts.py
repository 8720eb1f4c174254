"""Salts that keep the KV caches of tenants apart.

vLLM hashes a request's ``cache_salt`` into its first block, so requests with different salts find nothing of each
other, and neither do probes of how fast a guessed prompt is answered. A salt that can be guessed separates nothing:
these are made from a secret of the fleet.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from typing import Final

from dualmap.scheduling.tenants.tenant import Tenant

_SEPARATOR: Final = b"\xff"
"""Never part of UTF-8, so the parts cannot run into each other."""


class CacheSalts:
    """The salts of the tenants of a fleet, the same on every replica that has its secret."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._usual: dict[str, str] = {}

    def of(self, tenant: Tenant, sent: str | None) -> str | None:
        """The salt of a request with which its client sent this one, if any: whatever a client sends separates its
        requests from others of its tenant, and leads to no other tenant's. None where the tenant shares its cache."""
        if tenant.shares_cache:
            return None
        if sent:
            return self._made(tenant.name, sent)
        usual = self._usual.get(tenant.name)
        if usual is None:
            usual = self._usual[tenant.name] = self._made(tenant.name, "")
        return usual

    def _made(self, tenant: str, sent: str) -> str:
        parts = tenant.encode() + _SEPARATOR + sent.encode("utf-8", "surrogatepass")
        return urlsafe_b64encode(hmac.digest(self._secret, parts, "sha256")).decode().rstrip("=")
