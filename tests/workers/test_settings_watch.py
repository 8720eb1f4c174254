"""The leader's jobs start again when scheduling settings change in the running fleet."""

from __future__ import annotations

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.memory import MemoryStore
from dualmap.workers.settings_watch import SettingsChangedError, SettingsWatch


async def test_the_jobs_end_when_the_settings_are_others_than_they_were_started_with() -> None:
    pool = MemoryStore(SchedulingSettings()).pool("default")
    await SettingsWatch(pool, {}).tick()
    await pool.settings.change({"policy": "dualmap"}, by="ops")
    with pytest.raises(SettingsChangedError):
        await SettingsWatch(pool, {}).tick()
    await SettingsWatch(pool, {"policy": "dualmap"}).tick()
