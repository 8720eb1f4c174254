"""From a store URL to an open store."""

from __future__ import annotations

from scheduling.settings import SchedulingSettings
from statestore.base import Store
from statestore.errors import StoreConfigurationError
from statestore.memory import MemoryStore
from statestore.settings import StoreSettings


async def open_store(settings: StoreSettings, *, scheduling: SchedulingSettings) -> Store:
    """The opened store behind ``settings.url``; the caller closes it.

    Raises:
        StoreConfigurationError: the URL's scheme is unknown, or the server cannot serve a fleet.
        StoreUnavailableError: the server cannot be reached.
    """
    scheme = settings.url.partition("://")[0]
    if scheme == "memory":
        store: Store = MemoryStore(scheduling)
    else:
        raise StoreConfigurationError(f"store URL {settings.url!r}: unknown scheme {scheme!r}")
    await store.open()
    return store
