"""A pool whose store can go away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.statestore.errors import StoreError, StoreUnavailableError
from dualmap.statestore.pool import PoolStore

AddInstance = Callable[..., Awaitable[None]]
Reserve = Callable[..., Awaitable[PlaceStatus]]


class FlakyPool:
    """A pool that can be out of reach: every call then fails as a dead connection does, unless told otherwise."""

    def __init__(self, pool: PoolStore) -> None:
        self.name = pool.name
        self.away = False
        self.error: StoreError = StoreUnavailableError("the store is away")
        self.calls: list[str] = []
        self._pool = pool

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(method)
            if self.away:
                raise self.error
            return await getattr(self._pool, method)(*arguments, **named)

        return call
