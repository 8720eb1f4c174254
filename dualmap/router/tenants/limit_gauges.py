"""Gauges of how far the limits of tenants are used: read from the store at a scrape, and not too often."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dualmap.router.telemetry.tenant_metrics import TenantMetrics
from dualmap.router.tenants.usage import Books
from dualmap.runtime.clock import Clock
from dualmap.runtime.tenant_settings import limit_name
from dualmap.scheduling.tenants.budgets import Limit
from dualmap.statestore.errors import StoreError

MAX_AGE_S: Final = 5.0
WITHIN_S: Final = 0.05
"""A scrape waits so long for fresh figures; then it gets the last ones."""


class LimitGauges:
    """Sets the shares of limits that are used, of tenants that have metrics of their own."""

    def __init__(
        self,
        books: Books,
        limits: Callable[[], Mapping[str, Sequence[Limit]]],
        metrics: TenantMetrics,
        clock: Clock,
    ) -> None:
        """``limits`` returns the limits by tenant."""
        self._books = books
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._read_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read the store if the figures are old; waits ``WITHIN_S`` for it at most."""
        if self._reading is None and self._clock.monotonic_s() - self._read_s >= MAX_AGE_S:
            self._reading = asyncio.create_task(self._read())
            self._reading.add_done_callback(self._done)
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=WITHIN_S)

    def _done(self, _: asyncio.Task[None]) -> None:
        self._reading = None

    async def _read(self) -> None:
        with contextlib.suppress(StoreError):  # the last figures stay
            for tenant, limits in self._limits().items():
                for pool, books in self._books.items():
                    found = await books.budgets(tenant, limits)
                    for limit, amount in zip(limits, found, strict=True):
                        gauge = self._metrics.limit_used.labels(pool, tenant, limit_name(limit), limit.of)
                        gauge.set(amount / limit.amount)
            self._read_s = self._clock.monotonic_s()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
