"""Requests that other replicas placed: one stream to each of them, open only while somebody looks at this one's page.

A request is known in detail to the replica that placed it alone, so a page of one replica would show a part of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import msgspec
import orjson

from dualmap.router.peer_client import PeerClient
from dualmap.router.ui.own_requests import FIRST_REQUESTS, Keys
from dualmap.router.ui.status import ReplicaStatus

log = logging.getLogger(__name__)

PATH = "/ui/replica-stream"
RETRY_S = 5.0
_TIMEOUT = httpx.Timeout(2.0, read=5.0)
_KEPT_ROWS = 2 * FIRST_REQUESTS
"""Rows kept of one peer, between two ticks of this replica's own."""


class Heard(NamedTuple):
    """The last data of a peer."""

    rows: list[list[Any]]
    """Rows since the last call."""
    keys: Keys
    status: ReplicaStatus | None
    """None: it is not heard now, or of another version."""


class Peers:
    """Streams from peers, by replica id."""

    def __init__(self, own_id: str, admin_key: str | None, client: PeerClient) -> None:
        self._own_id = own_id
        self._headers = {} if admin_key is None else {b"authorization": b"Bearer " + admin_key.encode()}
        self._client = client
        self._streams: dict[str, _PeerStream] = {}

    def take(self, urls: Mapping[str, str]) -> dict[str, Heard]:
        """Take the data that the peers at ``urls`` (by replica id) sent since the last call, by replica id; opens and
        closes streams as they come and go. Never waits."""
        for gone in self._streams.keys() - urls.keys():
            self._streams.pop(gone).stop()
        for replica_id, url in urls.items():
            if replica_id not in self._streams:
                self._streams[replica_id] = _PeerStream(self._client.http, url, self._headers, replica_id)
        return {replica_id: stream.take() for replica_id, stream in self._streams.items()}

    def stop(self) -> None:
        """Close all streams. A later ``take`` opens them again."""
        for stream in self._streams.values():
            stream.stop()
        self._streams.clear()


class _PeerStream:
    """One peer's stream, opened again while it fails."""

    def __init__(self, client: httpx.AsyncClient, url: str, headers: Mapping[bytes, bytes], replica_id: str) -> None:
        self._client = client
        self._url = url + PATH
        self._headers = headers
        self._replica_id = replica_id
        self._rows: deque[list[Any]] = deque(maxlen=_KEPT_ROWS)
        self._keys: Keys = {}
        self._status: ReplicaStatus | None = None
        self._task = asyncio.create_task(self._run())

    def take(self) -> Heard:
        rows = list(self._rows)
        self._rows.clear()
        return Heard(rows, self._keys, self._status)

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._read()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, msgspec.ValidationError) as error:
                log.debug("the live page has no stream from %s: %s", self._replica_id, error)
            self._keys, self._status = {}, None
            await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        async with self._client.stream("GET", self._url, headers=self._headers, timeout=_TIMEOUT) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                message = orjson.loads(line[6:])
                if message["replica_id"] != self._replica_id:  # several replicas share an address
                    return
                self._rows.extend(message["requests"])
                self._status = msgspec.convert(message["status"], ReplicaStatus) if "status" in message else None
                self._keys = {
                    pool: {int(key): (blocks, count) for key, (blocks, count) in counts.items()}
                    for pool, counts in message["keys"].items()
                }
