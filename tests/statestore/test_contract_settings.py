"""Scheduling settings that change in the running fleet, on every store."""

from __future__ import annotations

import pytest

from dualmap.statestore.pool import PoolStore


async def test_changes_are_members_of_a_new_epoch_and_the_history_has_the_latest_first(pool: PoolStore) -> None:
    before = (await pool.membership()).epoch
    await pool.change_settings({"policy": "round-robin", "least_cost.recompute_weight": 2.5}, by="one")
    await pool.change_settings({"policy": None, "max_hold_s": 9.0}, by="two")
    members = await pool.membership()
    assert members.epoch > before
    assert members.overrides == {"least_cost.recompute_weight": 2.5, "max_hold_s": 9.0}
    history = await pool.settings_history(10)
    assert [(change.by, dict(change.changes)) for change in history] == [
        ("two", {"policy": None, "max_hold_s": 9.0}),
        ("one", {"policy": "round-robin", "least_cost.recompute_weight": 2.5}),
    ]
    assert len(await pool.settings_history(1)) == 1


async def test_a_wrong_change_is_refused_whole(pool: PoolStore) -> None:
    with pytest.raises(ValueError, match=r"scheduling\.policy"):
        await pool.change_settings({"max_hold_s": 9.0, "policy": "best"}, by="one")
    assert (await pool.membership()).overrides == {}
