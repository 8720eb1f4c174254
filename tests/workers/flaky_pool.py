"""A pool whose store can go away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.errors import StoreError, StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.changes import Changes
from dualmap.statestore.pool.running_settings import RunningSettings

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

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._pool, name)
        return FlakyPart(self, real) if isinstance(real, Changes) else self.call_of(name, real)

    def call_of(self, method: str, real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(method)
            if self.away:
                raise self.error
            return await real(*arguments, **named)

        return call


class FlakyPart:
    """A part of a flaky pool."""

    def __init__(self, flaky: FlakyPool, part: Changes) -> None:
        self._flaky = flaky
        self._part = part

    def in_force(self, overrides: Mapping[str, Any]) -> SchedulingSettings:
        """Computed here, without a call of the store."""
        assert isinstance(self._part, RunningSettings)
        return self._part.in_force(overrides)

    def __getattr__(self, method: str) -> Any:
        return self._flaky.call_of(method, getattr(self._part, method))
