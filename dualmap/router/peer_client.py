"""The HTTP client that a replica queries its peers with."""

from __future__ import annotations

from typing import Final

import httpx

from dualmap.runtime.trust import system_trust

_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""The live page keeps a stream open to every peer, and must not keep other queries waiting."""


class PeerClient:
    """One client for all that queries peers; each call says its timeout and its headers. It is made at the first call:
    a replica that runs alone never needs it."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """``transport`` replaces the network in tests."""
        self._transport = transport
        self._client: httpx.AsyncClient | None = None

    @property
    def http(self) -> httpx.AsyncClient:
        if self._client is None:
            # No environment proxies: they lead out of a data centre, not to the replicas in it.
            self._client = httpx.AsyncClient(
                verify=system_trust(), trust_env=False, limits=_LIMITS, transport=self._transport
            )
        return self._client

    async def close(self) -> None:
        """Close it. A later call makes another one."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
