"""From a store URL to an open store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore, Store
from statestore.embedded import EmbeddedValkey
from statestore.errors import StoreConfigurationError
from statestore.memory import MemoryStore
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from statestore.url import parse_store_url


async def open_store(settings: StoreSettings, *, scheduling: SchedulingSettings) -> Store:
    """The opened store behind ``settings.url``; the caller closes it.

    ``memory://`` lives and dies with this process; ``embedded://`` starts a private server that ends with the
    returned store; ``embedded:///PATH`` starts one on that Unix socket, or joins the one already there.

    Raises:
        StoreConfigurationError: the URL cannot be understood, or the server cannot serve a fleet.
        StoreUnavailableError: the server cannot be reached.
    """
    scheme = parse_store_url(settings.url).scheme
    if scheme == "memory":
        store: Store = MemoryStore(scheduling)
    elif scheme == "embedded":
        store = EmbeddedStore(settings, scheduling)
    else:
        store = RedisStore(settings, scheduling=scheduling)
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store


async def open_shared_store(settings: StoreSettings, *, scheduling: SchedulingSettings) -> Store:
    """``open_store`` for a router or a worker: each alone serves nothing, so the other must reach the store, too.

    Raises:
        StoreConfigurationError: as ``open_store``, and for a store that one process alone can see.
        StoreUnavailableError: the server cannot be reached.
    """
    if parse_store_url(settings.url).of_one_process:
        raise StoreConfigurationError(
            f"store.url {settings.url} is seen by one process only, and routers and workers are several:"
            " use redis:// or embedded:///PATH, or run 'dualmap up' without store.url"
        )
    return await open_store(settings, scheduling=scheduling)


class EmbeddedStore:
    """A ``RedisStore`` on a private server that it owns."""

    def __init__(self, settings: StoreSettings, scheduling: SchedulingSettings) -> None:
        path = parse_store_url(settings.url).path
        self._server = EmbeddedValkey(unix_socket=Path(path) if path else None)
        self._settings = settings
        self._scheduling = scheduling
        self._store: RedisStore | None = None

    @property
    def url(self) -> str:
        """The server's own URL, for other processes and for ``redis-cli -u``."""
        return self._server.url

    async def open(self) -> None:
        await asyncio.to_thread(self._server.start)
        settings = self._settings.model_copy(update={"url": self._server.url})
        self._store = RedisStore(settings, scheduling=self._scheduling)
        await self._store.open()

    async def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            await store.close()
        await asyncio.to_thread(self._server.stop)

    def _opened(self) -> RedisStore:
        if self._store is None:
            raise RuntimeError("the store is not open")
        return self._store

    async def ping(self) -> float:
        return await self._opened().ping()

    def pool(self, name: str) -> PoolStore:
        return self._opened().pool(name)
