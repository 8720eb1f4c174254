"""Settings watch: ends the leader's jobs when scheduling settings change in the running fleet, to start them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualmap.workers.loop import StopJobsError
from dualmap.workers.pool_reader import PoolReader


class SettingsChangedError(StopJobsError):
    """The jobs use settings that are not those of the fleet any more."""


class SettingsWatch:
    """Compares the fleet's changed settings with those that the jobs were started with."""

    name = "settings"
    interval_s = 0.5

    def __init__(self, reader: PoolReader, overrides: Mapping[str, Any]) -> None:
        self._reader = reader
        self._overrides = overrides

    async def tick(self) -> None:
        """Raises SettingsChangedError, StoreUnavailableError."""
        if (await self._reader.membership()).overrides != self._overrides:
            raise SettingsChangedError
