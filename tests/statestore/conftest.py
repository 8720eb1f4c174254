"""The store contract's backends: one suite, every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.connect import Store
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock
from tests.support.store_servers import SERVER_KINDS, StoreServers, binary_of


@pytest.fixture(params=SERVER_KINDS)
def server_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def server_url(server_kind: str, store_servers: StoreServers) -> str:
    """The URL of a real, empty server; a test that takes it is run on every kind."""
    return store_servers.emptied(server_kind)


@pytest.fixture
def binary(server_kind: str) -> Path:
    """The executable of a server, for tests of every kind that start Sentinels and nodes of a cluster."""
    return binary_of(server_kind)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def redis_store(
    url: str,
    clock: Callable[[], int] | None,
    prefix: str = "dualmap",
    scheduling: SchedulingSettings = SCHEDULING,
) -> RedisStore:
    settings = StoreSettings(url=url, prefix=prefix, command_timeout_s=5.0)
    return RedisStore(settings, scheduling=scheduling, own_clock=clock)


@pytest.fixture
def scheduling() -> SchedulingSettings:
    """Of the store's pools; modules of other settings have a fixture of their own."""
    return SCHEDULING


@pytest.fixture(params=["memory", *SERVER_KINDS])
async def store(
    request: pytest.FixtureRequest, store_servers: StoreServers, clock: HandClock, scheduling: SchedulingSettings
) -> AsyncIterator[Store]:
    """An open, empty store of each kind on the hand clock."""
    opened: Store
    if request.param == "memory":
        opened = MemoryStore(scheduling, now_ms=clock)
    else:
        opened = redis_store(store_servers.emptied(request.param), clock, scheduling=scheduling)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def pool(store: Store) -> PoolStore:
    return store.pool("default")
