"""Scheduling settings that change in the running fleet, on every store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import instance, lead, place, record


async def test_changes_are_members_of_a_new_epoch_and_the_history_has_the_latest_first(pool: PoolStore) -> None:
    before = (await pool.membership()).epoch
    await pool.settings.change({"policy": "round-robin", "slo_ttft_max_s": 2.5}, by="one")
    await pool.settings.change({"policy": None, "max_hold_s": 9.0}, by="two")
    members = await pool.membership()
    assert members.epoch > before
    assert members.overrides == {"slo_ttft_max_s": 2.5, "max_hold_s": 9.0}
    history = await pool.settings.history(10)
    assert [(change.by, dict(change.changes)) for change in history] == [
        ("two", {"policy": None, "max_hold_s": 9.0}),
        ("one", {"policy": "round-robin", "slo_ttft_max_s": 2.5}),
    ]
    assert len(await pool.settings.history(1)) == 1


async def test_a_wrong_change_is_refused_whole(pool: PoolStore) -> None:
    with pytest.raises(ValueError, match=r"scheduling\.policy"):
        await pool.settings.change({"max_hold_s": 9.0, "policy": "best"}, by="one")
    assert (await pool.membership()).overrides == {}


async def test_a_moved_or_adopted_request_is_listed_by_the_order_in_force_though_nobody_has_read_the_members(
    pool: PoolStore,
) -> None:
    fence = await lead(pool)
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, dispatch_window_tokens=1))
        await place(pool, f"first on {name}", name)
    await place(pool, "moves", "a", slo_ms=1000)
    held = await record(pool, "moves")
    await pool.settings.change({"queue_order": "deadline"}, by="an operator")

    await pool.queues.migrate(held, "b", reason="test", fence=fence)
    await pool.adopt([replace(held, request_id="adopted")])

    for instance_id in ("a", "b"):
        queue = await pool.queue_head(instance_id)
        assert queue is not None
        assert [entry.rank_ms - held.enqueued_ms for entry in queue.entries] == [1000]


def test_of_changes_that_cannot_be_read_the_rest_is_in_force() -> None:
    settings = MemoryStore(SchedulingSettings(queue_order="fifo")).pool("default").settings
    assert settings.overrides_from({b"queue_order": b'"deadline"', b"max_hold_s": b"often"}) == {
        "queue_order": "deadline"
    }
    assert settings.order_from({b"queue_order": b'"deadline"', b"policy": b"\xff"}).by_deadline
    assert not settings.order_from({}).by_deadline


def test_a_setting_that_a_later_version_removed_is_no_change_and_the_rest_is_in_force() -> None:
    settings = MemoryStore(SchedulingSettings()).pool("default").settings

    found = settings.overrides_from({b"least_cost.recompute_weight": b"2.5", b"slo_ttft_s": b"4.0"})

    assert found == {"slo_ttft_s": 4.0}
    assert settings.in_force(found).slo_ttft_s == 4.0
    assert settings.order_from({b"least_cost.recompute_weight": b"2.5"}) == settings.order_from({})


def test_options_are_in_force_with_the_policy_that_takes_them_and_no_other() -> None:
    of_sglang = {b"policy_options.cache_threshold": b"0.5", b"max_hold_s": b"9"}
    chosen = MemoryStore(SchedulingSettings()).pool("default").settings
    configured = MemoryStore(SchedulingSettings(policy="sglang")).pool("default").settings

    assert chosen.overrides_from({b"policy": b'"sglang"', **of_sglang})["policy_options.cache_threshold"] == 0.5
    assert configured.overrides_from(of_sglang)["policy_options.cache_threshold"] == 0.5
    assert chosen.overrides_from(of_sglang) == {"max_hold_s": 9}


@pytest.mark.parametrize(
    "changes",
    [
        {"policy_options.no_such_option": 1},
        {"policy_options.miss_penalty": "much"},
        {"policy": "sglang", "policy_options.cache_threshold": 2},
    ],
)
async def test_a_policy_refuses_options_that_it_does_not_take(pool: PoolStore, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^scheduling\.policy_options: "):
        await pool.settings.change(changes, by="one")
    assert (await pool.membership()).overrides == {}


def test_what_is_to_be_reverted_must_be_a_setting_unless_a_former_version_changed_it() -> None:
    settings = MemoryStore(SchedulingSettings()).pool("default").settings

    with pytest.raises(ValueError, match=r"there is no setting scheduling\.slo_ttft; did you mean slo_ttft_s\?"):
        settings.in_force_after({}, {"slo_ttft": None})
    assert settings.in_force_after({"once_a_setting": 1}, {"once_a_setting": None}) == SchedulingSettings()
    assert settings.in_force_after({}, {"slo_ttft_s": None}) == SchedulingSettings()
