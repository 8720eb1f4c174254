"""Which tenants are at a limit, and at which: counted for the heartbeat and the live page, and said in the log now and
then."""

from __future__ import annotations

import logging
from typing import Final

from dualmap.runtime.tenant_settings import limit_name
from dualmap.scheduling.tenants.budgets import Drawn, Draws

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 60.0
"""A tenant that stays at a limit has one line in the log in this time."""
MOST: Final = 1024
"""Limits that are counted one by one; those that were first met longest ago are forgotten."""


class _Hits:
    """The requests that one limit of a tenant kept out."""

    __slots__ = ("count", "logged", "logged_s")

    def __init__(self) -> None:
        self.count = 0
        self.logged = 0
        """The count when it was last logged."""
        self.logged_s = float("-inf")


class LimitHits:
    """Counts the requests that limits kept out, since the replica began."""

    def __init__(self) -> None:
        self._hits: dict[str, _Hits] = {}

    def hit(self, tenant: str, draws: Draws, drawn: Drawn, now_s: float) -> None:
        """A limit of the tenant kept a request out."""
        assert drawn.unmet is not None
        limit = draws.each[drawn.unmet].budget.limit
        name = f"{tenant}/{limit_name(limit)}" + (f"/{limit.of}" if limit.of else "")
        hits = self._hits.get(name)
        if hits is None:
            if len(self._hits) >= MOST:
                del self._hits[next(iter(self._hits))]
            hits = self._hits[name] = _Hits()
        hits.count += 1
        if now_s - hits.logged_s >= LOG_EVERY_S:
            log.warning(
                "tenant %s is at its limit %s of %s%s: %d requests refused since this was last said",
                tenant, limit_name(limit), limit.amount, f" for {limit.of}" if limit.of else "",
                hits.count - hits.logged,
            )  # fmt: skip
            hits.logged, hits.logged_s = hits.count, now_s

    @property
    def counts(self) -> dict[str, int]:
        """The counts by tenant and limit, as ``TENANT/LIMIT`` or ``TENANT/LIMIT/OF``."""
        return {name: hits.count for name, hits in self._hits.items()}
