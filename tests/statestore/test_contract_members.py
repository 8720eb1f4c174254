"""The store contract: members and their states, on every backend."""

from __future__ import annotations

import pytest

from dualmap.runtime.pool_settings import InstanceSettings
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.state.instance import InstanceState, Role
from dualmap.statestore.call_values import Note
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.kv_views import KvViewStatus
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import CHAIN, HandClock, finish, instance, place


async def test_an_empty_pool_has_no_members_and_nothing_learned(pool: PoolStore) -> None:
    membership = await pool.membership()

    assert dict(membership.instances) == {}
    assert (membership.epoch, membership.tree_version, membership.learned) == (0, 0, Learned())


async def test_an_instance_is_read_back_as_it_was_put(pool: PoolStore) -> None:
    spec = instance("gpu-0:8000", role=Role.PREFILL, prefill_tokens_per_s=1234.5, kv_capacity_tokens=777)

    await pool.members.put_instance(spec)

    assert (await pool.membership()).instances == {"gpu-0:8000": spec}


async def test_a_rank_is_read_back(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", data_parallel_rank=0))
    await pool.members.put_instance(instance("b"))

    members = (await pool.membership()).instances
    assert (members["a"].data_parallel_rank, members["b"].data_parallel_rank) == (0, None)


async def test_every_change_of_membership_is_a_new_epoch_and_repetitions_are_not(pool: PoolStore) -> None:
    epochs = []

    async def epoch_after(change: object) -> None:
        epochs.append((await pool.membership()).epoch)

    await epoch_after(await pool.members.put_instance(instance("a")))
    await epoch_after(await pool.members.put_instance(instance("a")))
    await epoch_after(await pool.members.put_instance(instance("a", url="http://elsewhere")))
    await epoch_after(await pool.members.set_instance_state("a", InstanceState.DRAINING))
    await epoch_after(await pool.members.set_instance_state("a", InstanceState.DRAINING))
    await epoch_after(await pool.members.remove_instance("a"))
    await epoch_after(await pool.members.remove_instance("a"))

    assert epochs == [1, 1, 2, 3, 3, 4, 4]


async def test_a_membership_has_what_changed_and_else_what_was_read_before(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await pool.members.add_name("sql", "lora")
    first, again = await pool.membership(), await pool.membership()
    assert again == first
    assert (again.instances is first.instances, again.names is first.names) == (True, True)

    await pool.members.put_instance(instance("b"))
    second = await pool.membership()
    await pool.members.add_name("sum", "lora")
    await pool.members.remove_instance("a")
    third = await pool.membership()

    assert [[*each.instances] for each in (first, second, third)] == [["a"], ["a", "b"], ["b"]]
    assert second.names is first.names
    assert third.names == {"sql": "lora", "sum": "lora"}


async def test_an_update_keeps_state_load_and_queue(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1))
    await pool.members.set_instance_state("a", InstanceState.DRAINING, expected=InstanceState.READY)
    await pool.members.set_instance_state("a", InstanceState.READY)
    await place(pool, "sent")
    await place(pool, "held")

    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, state=InstanceState.DOWN, url="http://new"))

    spec = (await pool.membership()).instances["a"]
    load = (await pool.loads())["a"]
    assert (spec.url, spec.state) == ("http://new", InstanceState.READY)
    assert (load.queued_requests, load.running_requests, load.pending_tokens) == (1, 1, 800)


async def test_changes_of_different_fields_do_not_undo_each_other(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", kv_capacity_tokens=7))

    assert await pool.members.update_instance("a", {"kv_capacity_tokens": 8})
    assert await pool.members.update_instance("a", {"max_running_requests": 3, "url": "http://new"})

    spec = instance("a", kv_capacity_tokens=8, max_running_requests=3, url="http://new")
    membership = await pool.membership()
    assert (membership.instances["a"], membership.epoch) == (spec, 3)


async def test_a_change_that_changes_nothing_is_no_new_epoch(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))

    assert await pool.members.update_instance("a", {"max_running_requests": 8})
    assert await pool.members.update_instance("a", {})

    assert (await pool.membership()).epoch == 1


async def test_an_instance_that_was_removed_is_not_updated(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await pool.members.remove_instance("a")

    assert await pool.members.update_instance("a", {"max_running_requests": 3}) is False
    assert dict((await pool.membership()).instances) == {}


async def test_an_update_under_an_old_fence_is_refused(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a", kv_capacity_tokens=7))
    lease = await pool.leader_lease.acquire("worker", 1000)
    assert lease is not None
    await pool.members.update_instance("a", {"kv_capacity_tokens": 8}, fence=lease.fence)
    clock.advance(1000)

    with pytest.raises(LeaseLostError):
        await pool.members.update_instance("a", {"kv_capacity_tokens": 9}, fence=lease.fence)

    assert (await pool.membership()).instances["a"].kv_capacity_tokens == 8


async def test_a_state_changes_only_from_the_expected_one(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", state=InstanceState.STARTING))

    refused = await pool.members.set_instance_state("a", InstanceState.READY, expected=InstanceState.DOWN)
    taken = await pool.members.set_instance_state("a", InstanceState.READY, expected=InstanceState.STARTING)
    unknown = await pool.members.set_instance_state("nobody", InstanceState.READY)

    assert (refused, taken, unknown) == (False, True, False)


async def test_going_down_forgets_what_the_cache_held(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r", chain=CHAIN)
    before = (await pool.observe(["a"], CHAIN)).loads["a"]

    await pool.members.set_instance_state("a", InstanceState.DOWN)

    after = (await pool.observe(["a"], CHAIN)).loads["a"]
    assert (before.hit_blocks, before.cached_blocks) == (4, 4)
    assert (after.hit_blocks, after.cached_blocks) == (0, 0)


async def test_an_instance_that_goes_down_with_a_living_engine_keeps_what_its_cache_held(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r", chain=CHAIN)
    claimed = await pool.kv_events.claim("a", "w")
    assert claimed is not None

    assert await pool.members.set_instance_state("a", InstanceState.DOWN, keeps_cache=True)

    down = (await pool.observe(["a"], CHAIN)).loads["a"]
    assert (down.state, down.hit_blocks, down.cached_blocks) == (InstanceState.DOWN, 4, 4)
    await pool.kv_events.mark("a", claimed.fence, KvViewStatus.EXACT, "")  # the claim of its events goes on


async def test_an_instance_that_was_parked_comes_back_with_an_empty_cache(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r", chain=CHAIN)
    await finish(pool, "r")
    for state in (InstanceState.DRAINING, InstanceState.STANDBY):
        await pool.members.set_instance_state("a", state)
    parked = (await pool.observe(["a"], CHAIN)).loads["a"]

    await pool.members.set_instance_state("a", InstanceState.STARTING)

    after = (await pool.observe(["a"], CHAIN)).loads["a"]
    assert (parked.hit_blocks, after.hit_blocks, after.cached_blocks) == (4, 0, 0)


async def test_a_busy_instance_is_not_removed_and_an_idle_one_leaves_nothing(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")

    busy = await pool.members.remove_instance("a")
    await finish(pool, "r")
    idle = await pool.members.remove_instance("a")

    assert (busy, idle) == (False, True)
    assert dict((await pool.membership()).instances) == {}
    assert dict((await pool.observe(["a"], CHAIN)).loads) == {}


async def test_pools_of_one_store_do_not_see_each_other(store: object) -> None:
    first, second = store.pool("first"), store.pool("second")  # type: ignore[attr-defined]

    await first.members.put_instance(instance("a"))

    assert dict((await second.membership()).instances) == {}


async def test_what_an_instance_lists_is_read_back_and_is_a_new_epoch(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    before = (await pool.membership()).epoch

    for _ in range(2):
        await pool.members.update_instance("a", {"models": {"qwen": "", "sql": "qwen"}})
    found = await pool.membership()

    assert (found.instances["a"].models, found.epoch) == ({"qwen": "", "sql": "qwen"}, before + 1)


async def test_added_names_are_read_back_until_they_are_removed(pool: PoolStore) -> None:
    await pool.members.add_name("sql", "lora")
    await pool.members.add_name("gpt-4o", "")
    added = await pool.membership()
    assert added.names == {"sql": "lora", "gpt-4o": ""}

    assert [await pool.members.remove_name("sql"), await pool.members.remove_name("sql")] == [True, False]
    left = await pool.membership()

    assert left.names == {"gpt-4o": ""}
    assert left.epoch > added.epoch > 0


async def test_what_is_wrong_with_an_instance_is_noted_without_a_new_epoch(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))
    lease = await pool.leader_lease.acquire("leader", 60_000)
    assert lease is not None
    before = (await pool.membership()).epoch

    await pool.members.note_instance("a", "connection refused", fence=lease.fence)
    assert (
        (await pool.overview()).notes == await pool.members.notes() == {"a": Note("connection refused", clock.now_ms)}
    )
    with pytest.raises(LeaseLostError):
        await pool.members.note_instance("a", "by a deposed leader", fence=lease.fence - 1)
    await pool.members.note_instance("a", None, fence=lease.fence)
    assert (await pool.snapshot()).notes == {}

    await pool.members.note_instance("a", "connection refused", fence=lease.fence)
    await pool.members.remove_instance("a")
    assert await pool.members.notes() == {}
    assert (await pool.membership()).epoch == before + 1


async def test_an_instance_may_have_the_least_and_the_most_that_settings_allow(pool: PoolStore) -> None:
    given = {
        "least": {
            "prefill_tokens_per_s": 1e-9,
            "kv_capacity_tokens": 1,
            "max_running_requests": 1,
            "max_queued_requests": 0,
        },
        "most": {"prefill_tokens_per_s": 1e9, "kv_capacity_tokens": 10**12, "max_queued_requests": 10**6},
    }
    specs = {name: InstanceSettings(id=name, url="http://a", **figures).spec() for name, figures in given.items()}
    for spec in specs.values():
        await pool.members.put_instance(spec)

    assert (await pool.membership()).instances == specs
