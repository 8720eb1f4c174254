"""Opening a store by its URL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from dualmap.runtime.certificates import FollowedFiles
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.embedded import EmbeddedValkey, server_binary
from dualmap.statestore.errors import StoreConfigurationError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.redis.servers import Servers
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.allotment_ledger import AllotmentLedger
from dualmap.statestore.tenants.tenant_book import TenantBook
from dualmap.statestore.url import parse_store_url


class Store(Protocol):
    """A connection to where pools live."""

    @property
    def certificates(self) -> tuple[FollowedFiles[Any], ...]:
        """The certificates of the connections, for reports."""

    @property
    def tenants(self) -> TenantBook:
        """The tenants of all pools."""

    @property
    def allotments(self) -> AllotmentLedger:
        """The ledger of budgets that are divided among pools."""

    @property
    def batches(self) -> BatchBook:
        """The files and batches of all tenants."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def pool(self, name: str) -> PoolStore: ...


def require_shared(settings: StoreSettings) -> None:
    """Check, without a connection, that the settings name a store which several processes can use.

    Raises:
        StoreConfigurationError: one process alone can see it, or a file that its URL names cannot be read.
    """
    url = parse_store_url(settings.url)
    if url.of_one_process:
        raise StoreConfigurationError(
            f"store.url {settings.url} is seen by one process only, and routers and workers are several:"
            " use redis:// or embedded:///PATH, or run 'dualmap up' without store.url"
        )
    if url.scheme == "embedded":
        server_binary()
    else:
        Servers(settings.url, settings.connect_timeout_s)


async def open_store(settings: StoreSettings, *, scheduling: SchedulingSettings, shared: bool = False) -> Store:
    """The opened store behind ``settings.url``; the caller closes it.

    ``memory://`` lives and dies with this process; ``embedded://`` starts a private server that ends with the
    returned store; ``embedded:///PATH`` starts one on that Unix socket, or joins the one already there. A ``shared``
    one is for a router or a worker, which need the same one: other processes must be able to reach it.

    Raises:
        StoreConfigurationError: the server cannot serve a fleet, or one process alone can see a shared store.
        StoreUnavailableError: the server cannot be reached.
    """
    url = parse_store_url(settings.url)
    if shared:
        require_shared(settings)
    if url.scheme == "memory":
        store: Store = MemoryStore(scheduling)
    elif url.scheme == "embedded":
        server = EmbeddedValkey(unix_socket=Path(url.path) if url.path else None)
        await asyncio.to_thread(server.start)
        own = settings.model_copy(update={"url": server.url})
        store = EmbeddedStore(server, own, scheduling=scheduling)
    else:
        store = RedisStore(settings, scheduling=scheduling)
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store


class EmbeddedStore(RedisStore):
    """A store on a private server that it owns."""

    def __init__(self, server: EmbeddedValkey, settings: StoreSettings, **options: Any) -> None:
        super().__init__(settings, **options)
        self._server = server

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._server.stop)
