"""Watching a fleet from outside during a replay: pending tokens over instances, and migrations."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from dualmap.simulation.figures.results import LoadSample
from dualmap.simulation.http_client import HttpClient, HttpClientError

_SAMPLE = re.compile(r"^dualmap_(instance_pending_tokens|migrations_total)\{([^}]*)\} (\S+)$", re.MULTILINE)
_INSTANCE = re.compile(r'\binstance="([^"]*)"')
_PROBE_TIMEOUT_S = 5.0


class FleetProbe:
    """Reads the router's ``/metrics`` at intervals. Against any other server it reports that it sees nothing."""

    def __init__(self, client: HttpClient, interval_s: float) -> None:
        self.samples: list[LoadSample] = []
        self._client = client
        self._interval_s = interval_s
        self._first_migrations: int | None = None
        self._last_migrations: int | None = None

    @property
    def migrations(self) -> int | None:
        """Migrations between the first and the last look; None without two looks at a fleet."""
        if self._first_migrations is None or self._last_migrations is None:
            return None
        return self._last_migrations - self._first_migrations

    async def watch(self) -> None:
        """Look, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Read once; a server that does not answer in time is skipped."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                status, page = await self._client.read("/metrics")
        except (HttpClientError, TimeoutError):
            return
        if status == 200:
            self._take(page.decode("utf-8", "replace"))

    def _take(self, page: str) -> None:
        pending: dict[str, int] = {}
        migrations = 0
        for name, labels, value in _SAMPLE.findall(page):
            if name == "migrations_total":
                migrations += int(float(value))
            elif (match := _INSTANCE.search(labels)) is not None:
                pending[match[1]] = pending.get(match[1], 0) + int(float(value))
        if not pending:
            return
        now_s = asyncio.get_running_loop().time()
        ordered: Sequence[int] = [pending[instance_id] for instance_id in sorted(pending)]
        self.samples.append(LoadSample(now_s, tuple(ordered), held_requests=0, running_requests=0))
        if self._first_migrations is None:
            self._first_migrations = migrations
        self._last_migrations = migrations
