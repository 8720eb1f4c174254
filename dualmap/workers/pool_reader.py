"""A pool's members and loads, read once for all jobs that need them at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, Protocol, TypeVar

from dualmap.runtime.clock import Clock
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.statestore.call_values import Membership, PoolOverview
from dualmap.statestore.pool import PoolStore

T = TypeVar("T")


class PoolReader(Protocol):
    """Reads that a job makes before it acts; a ``PoolStore`` itself is one, always fresh."""

    async def membership(self) -> Membership: ...

    async def loads(self) -> Mapping[str, InstanceLoad]: ...

    async def overview(self) -> PoolOverview: ...


class _Cached(Generic[T]):
    """One answer, fetched again when older than the bound; concurrent callers share the fetch."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], clock: Clock, max_age_s: float) -> None:
        self._fetch = fetch
        self._clock = clock
        self._max_age_s = max_age_s
        self._lock = asyncio.Lock()
        self._answer: tuple[float, T] | None = None

    async def get(self) -> T:
        async with self._lock:
            now_s = self._clock.monotonic_s()
            if self._answer is None or now_s - self._answer[0] >= self._max_age_s:
                self._answer = (now_s, await self._fetch())
            return self._answer[1]

    def forget(self) -> None:
        self._answer = None


class CachedPoolReader:
    """A ``PoolReader`` no older than ``max_age_s``: with hundreds of instances a read costs tens of milliseconds.

    Its data may be out of date when a job acts on it, as with any read: writes check their preconditions.
    """

    def __init__(self, pool: PoolStore, clock: Clock, max_age_s: float) -> None:
        self._membership = _Cached(pool.membership, clock, max_age_s)
        self._loads = _Cached(pool.loads, clock, max_age_s)
        self._overview = _Cached(pool.overview, clock, max_age_s)

    def forget_membership(self) -> None:
        """The members were changed, and the next reader is to see that."""
        self._membership.forget()

    async def membership(self) -> Membership:
        return await self._membership.get()

    async def loads(self) -> Mapping[str, InstanceLoad]:
        return await self._loads.get()

    async def overview(self) -> PoolOverview:
        return await self._overview.get()
