"""A store whose pools route on when it is away."""

from __future__ import annotations

from scheduling.settings import SchedulingSettings
from statestore.base import Store
from statestore.failover.pool import FailoverPool


class FailoverStore:
    """Wraps an open store, and closes it."""

    def __init__(self, primary: Store, scheduling: SchedulingSettings) -> None:
        self._primary = primary
        self._scheduling = scheduling
        self._pools: dict[str, FailoverPool] = {}

    async def open(self) -> None:
        await self._primary.open()

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
        await self._primary.close()

    async def ping(self) -> float:
        return await self._primary.ping()

    def pool(self, name: str) -> FailoverPool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = FailoverPool(self._primary.pool(name), self._scheduling)
        return pool
