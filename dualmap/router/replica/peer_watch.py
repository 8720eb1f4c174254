"""Whether the other replicas can be reached at the addresses that they advertise.

Nothing that a request needs depends on it: replicas share what matters through the store. ``explain`` and the live page
query peers, and a layerwise decoder calls the replica of its request, so an address that cannot be resolved is reported
here before it is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import httpx

from dualmap.router.peer_client import PeerClient
from dualmap.runtime.clock import Clock
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)

FIRST_S: Final = 5.0
"""Peers that start at the same time are given this long."""
INTERVAL_S: Final = 30.0
QUERY_TIMEOUT_S: Final = 2.0
FAILURES: Final = 2
"""Failures in a row before a peer is reported: one that is just restarted is missed by one round."""


class PeerWatch:
    """Asks every peer for ``/health`` now and then."""

    def __init__(
        self,
        own_id: str,
        addresses: Callable[[], Awaitable[Mapping[str, str]]],
        clock: Clock,
        client: PeerClient,
    ) -> None:
        """``addresses`` are those of all living replicas, this one's included, by id."""
        self._own_id = own_id
        self._addresses = addresses
        self._clock = clock
        self._client = client
        self._failures: Counter[str] = Counter()
        self.unreachable: Mapping[str, str] = {}
        """Why, by the id of a replica that could not be reached."""

    async def run(self) -> None:
        """Runs until cancelled."""
        await self._clock.sleep(FIRST_S)
        while True:
            with contextlib.suppress(StoreError):  # who the peers are is not known then
                await self.look()
            await self._clock.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Make one round. An address that several replicas share leads to any of them, and is not called."""
        known = await self._addresses()
        shared = Counter(known.values())
        peers = {name: url for name, url in known.items() if url and name != self._own_id and shared[url] == 1}
        wrong = await self._wrong(peers) if peers else {}
        self._failures = Counter({name: self._failures[name] + 1 for name in wrong})
        unreachable = {name: why for name, why in wrong.items() if self._failures[name] >= FAILURES}
        self._tell(unreachable, peers)
        self.unreachable = unreachable

    async def _wrong(self, peers: Mapping[str, str]) -> Mapping[str, str]:
        """Why peers could not be reached, by id."""
        answers = await asyncio.gather(*(self._query(name, url) for name, url in peers.items()))
        return {name: why for name, why in zip(peers, answers, strict=True) if why is not None}

    def _tell(self, unreachable: Mapping[str, str], peers: Mapping[str, str]) -> None:
        for name in unreachable.keys() - self.unreachable.keys():
            log.warning(
                "replica %s cannot be reached at %s: %s; explain and the live page lack its requests. Set its"
                " router.advertise_url to an address that other replicas reach",
                name,
                peers[name],
                unreachable[name],
            )
        for name in self.unreachable.keys() & peers.keys() - unreachable.keys():
            log.info("replica %s can be reached at %s", name, peers[name])

    async def _query(self, name: str, url: str) -> str | None:
        """Why the replica cannot be reached there; None if it can."""
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                answer = (await self._client.http.get(f"{url}/health", timeout=QUERY_TIMEOUT_S)).json()
        except TimeoutError:
            return f"no answer within {QUERY_TIMEOUT_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        found = answer.get("replica_id") if isinstance(answer, dict) else None
        return None if found == name else f"{found or 'something else'} answers there"
