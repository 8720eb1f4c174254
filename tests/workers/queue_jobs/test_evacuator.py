"""No request waits for an instance that is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState, Role
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.queue_jobs import Evacuator
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve


@pytest.fixture
def evacuator(leading: LeaderContext, scheduling: SchedulingSettings) -> Evacuator:
    return Evacuator(leading, scheduling)


async def test_held_requests_of_a_down_instance_move_and_keep_their_place_in_time(
    pool: PoolStore, evacuator: Evacuator, add_instance: AddInstance, reserve: Reserve, value: Callable[..., float]
) -> None:
    # given held requests with and without a ready other candidate
    for instance_id in "abcd":
        await add_instance(instance_id, dispatch_window_tokens=1000)
    await reserve("running", "a")
    await reserve("r1", "a", other="b")
    await reserve("r2", "a", other="d")
    await pool.members.remove_instance("d")
    before = await pool.records(["r1", "r2"])
    await pool.members.set_instance_state("a", InstanceState.DOWN)

    await evacuator.tick()

    after = await pool.records(["r1", "r2", "running"])
    assert after["r1"].instance_id == "b"
    assert after["r2"].instance_id == "c", "the least loaded one"
    assert after["running"].instance_id == "a", "its replica retries it by itself"
    assert all(after[name].enqueued_ms == before[name].enqueued_ms for name in before)
    assert value("dualmap_worker_migrations_total", reason="instance_down", status="migrated") == 2


async def test_with_nobody_ready_the_requests_stay_and_move_as_soon_as_somebody_is(
    pool: PoolStore, evacuator: Evacuator, add_instance: AddInstance, reserve: Reserve
) -> None:
    await add_instance("a", dispatch_window_tokens=1000)
    await add_instance("b", InstanceState.STARTING)
    await reserve("r0", "a")
    await reserve("r1", "a", other="b")
    await pool.members.set_instance_state("a", InstanceState.DOWN)

    await evacuator.tick()
    assert (await pool.records(["r1"]))["r1"].instance_id == "a"

    await pool.members.set_instance_state("b", InstanceState.READY)
    await evacuator.tick()
    assert (await pool.records(["r1"]))["r1"].instance_id == "b"


async def test_a_prefill_instance_takes_no_whole_request_in(
    pool: PoolStore, evacuator: Evacuator, add_instance: AddInstance, reserve: Reserve
) -> None:
    # given an idle prefill instance besides a mixed one that has work
    await add_instance("a", dispatch_window_tokens=1000)
    await add_instance("prefill", role=Role.PREFILL)
    await add_instance("c")
    await reserve("running", "a")
    await reserve("working", "c")
    await reserve("held", "a")
    await pool.members.set_instance_state("a", InstanceState.DOWN)

    await evacuator.tick()

    assert (await pool.records(["held"]))["held"].instance_id == "c"


async def test_a_full_queue_of_the_other_candidate_keeps_nobody_on_a_lost_instance(
    pool: PoolStore, evacuator: Evacuator, add_instance: AddInstance, reserve: Reserve, value: Callable[..., float]
) -> None:
    # given two held requests whose other candidate b has one place, and c, which has more to do
    await add_instance("a", dispatch_window_tokens=1000)
    await add_instance("b", dispatch_window_tokens=1000, max_queued_requests=1)
    await add_instance("c", dispatch_window_tokens=1000)
    for instance_id in "abc":
        await reserve(f"running-{instance_id}", instance_id, 9000 if instance_id == "c" else 1000)
    await reserve("r1", "a", other="b")
    await reserve("r2", "a", other="b")
    await pool.members.set_instance_state("a", InstanceState.DOWN)

    await evacuator.tick()

    after = await pool.records(["r1", "r2"])
    assert (after["r1"].instance_id, after["r2"].instance_id) == ("b", "c")
    assert value("dualmap_worker_migrations_total", reason="instance_down", status="queue_full") == 0


@pytest.mark.parametrize("scheduling", [SchedulingSettings(queue_order="deadline")])
async def test_who_is_late_is_not_offered_again_and_again_to_an_instance_that_would_have_to_hold_it(
    pool: PoolStore,
    evacuator: Evacuator,
    add_instance: AddInstance,
    reserve: Reserve,
    clock: ManualClock,
    value: Callable[..., float],
) -> None:
    # given b, which has room but holds no request, and c, which has more to do and holds
    await add_instance("a", dispatch_window_tokens=1)
    await add_instance("b", max_queued_requests=0)
    await add_instance("c", dispatch_window_tokens=1)
    await reserve("running", "a")
    await reserve("late", "a", slo_ms=1000)
    await reserve("on-b", "b", 100, slo_ms=60_000)
    await reserve("on-c", "c", 300, slo_ms=60_000)
    await clock.advance(2.0)
    await pool.members.set_instance_state("a", InstanceState.DOWN)

    await evacuator.tick()

    assert (await pool.records(["late"]))["late"].instance_id == "c"
    assert value("dualmap_worker_migrations_total", reason="instance_down", status="queue_full") == 0


async def test_what_waits_for_a_draining_instance_moves_and_what_runs_there_stays(
    pool: PoolStore, evacuator: Evacuator, add_instance: AddInstance, reserve: Reserve
) -> None:
    await add_instance("a", dispatch_window_tokens=1000)
    await add_instance("b")
    await reserve("running", "a")
    await reserve("held", "a", other="b")
    await pool.members.set_instance_state("a", InstanceState.DRAINING)

    await evacuator.tick()

    after = await pool.records(["running", "held"])
    assert (after["running"].instance_id, after["held"].instance_id) == ("a", "b")
    assert (await pool.snapshot()).migrations == {"drain": 1}


async def test_an_instance_that_is_back_in_service_keeps_its_queue(
    pool: PoolStore,
    leading: LeaderContext,
    scheduling: SchedulingSettings,
    add_instance: AddInstance,
    reserve: Reserve,
) -> None:
    # given a look at loads that was over when the evacuator acted
    await add_instance("a", dispatch_window_tokens=1000)
    await add_instance("b")
    await reserve("running", "a")
    await reserve("held", "a", other="b")
    await pool.members.set_instance_state("a", InstanceState.DRAINING)
    loads_then = await pool.loads()
    await pool.members.set_instance_state("a", InstanceState.READY)

    class Outdated:
        membership = staticmethod(pool.membership)

        async def loads(self) -> Any:
            return loads_then

    await Evacuator(replace(leading, reader=Outdated()), scheduling).tick()

    assert (await pool.records(["held"]))["held"].instance_id == "a"
