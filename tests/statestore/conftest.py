"""The store contract's backends: one suite, every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore, Store
from statestore.memory import MemoryStore
from statestore.redis import RedisStore
from statestore.settings import StoreSettings
from tests.statestore.samples import SCHEDULING, HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def redis_store(
    url: str,
    clock: Callable[[], int] | None,
    prefix: str = "dualmap",
    scheduling: SchedulingSettings = SCHEDULING,
    *,
    batched: bool = True,
) -> RedisStore:
    settings = StoreSettings(url=url, prefix=prefix, command_timeout_s=5.0)
    return RedisStore(settings, scheduling=scheduling, batched=batched, test_clock=clock)


@pytest.fixture
def scheduling() -> SchedulingSettings:
    """Of the store's pools; modules of other settings have a fixture of their own."""
    return SCHEDULING


@pytest.fixture(params=["memory", "valkey", "valkey unbatched"])
async def store(
    request: pytest.FixtureRequest, clock: HandClock, scheduling: SchedulingSettings
) -> AsyncIterator[Store]:
    """An open, empty store of each kind on the hand clock. Replicas batch their calls to Valkey, other
    processes do not."""
    if request.param == "memory":
        opened: Store = MemoryStore(scheduling, now_ms=clock)
    else:
        url, batched = request.getfixturevalue("valkey_url"), request.param == "valkey"
        opened = redis_store(url, clock, scheduling=scheduling, batched=batched)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def pool(store: Store) -> PoolStore:
    return store.pool("default")
