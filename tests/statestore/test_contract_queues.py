"""The store contract: queues, the commit of plans, deferral and migration; on every backend.

One token takes ten milliseconds here, so a request of 400 tokens takes four seconds; an instance is given one request
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Weights
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.queue_log import Deferral, WaitEnd, WentAhead
from dualmap.scheduling.queues.queue_order import (
    DEFERRED_RANK_MS,
    LATE_LIMIT,
    PLAN_LIMIT,
    PlanStep,
    QueueHead,
    QueuePlan,
)
from dualmap.scheduling.queues.rebalance import HotQueue, Migration
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.shares import LEVELS
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from tests.statestore import samples
from tests.statestore.samples import (
    CHAIN,
    DEADLINE,
    HandClock,
    assert_sums_hold,
    chain,
    finish,
    first_token,
    hold,
    instance,
    lead,
    place,
    record,
)

LONG_MS = 600_000


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return DEADLINE


def one_at_a_time(instance_id: str = "a", **changes: Any) -> InstanceSpec:
    made = {"dispatch_window_tokens": 1, "prefill_tokens_per_s": 100.0, "max_queued_requests": 100, **changes}
    return instance(instance_id, **made)


async def busy(pool: PoolStore, spec: InstanceSpec) -> str:
    """An instance with one dispatched request; the request's id."""
    await pool.members.put_instance(spec)
    request_id = f"busy-{spec.instance_id}"
    assert (await hold(pool, request_id, spec.instance_id, slo_ms=LONG_MS)).state is RequestState.DISPATCHED
    return request_id


async def head(pool: PoolStore, instance_id: str = "a") -> QueueHead:
    queue = await pool.queue_head(instance_id)
    assert queue is not None
    return queue


async def commit(pool: PoolStore, *steps: PlanStep, instance_id: str = "a", **changes: Any) -> CommitReply:
    version = changes.pop("version", (await head(pool, instance_id)).load.version)
    return await pool.commit(QueuePlan(instance_id, version, steps), **changes)


async def order_of(pool: PoolStore, instance_id: str = "a") -> list[str]:
    return [entry.request_id for entry in (await head(pool, instance_id)).entries]


async def end(pool: PoolStore, request_id: str) -> int:
    """As its replica does: how many requests its room was given to."""
    return await samples.grant(pool, (await finish(pool, request_id)).queue, DEADLINE)


async def sweep(pool: PoolStore) -> int:
    return await samples.sweep(pool, scheduling=DEADLINE)


async def dispatched(pool: PoolStore, request_ids: Sequence[str]) -> list[str]:
    records = await pool.records(request_ids)
    return [request_id for request_id in request_ids if records[request_id].state is not RequestState.HELD]


# the head of a queue -----------------------------------------------------------------------------------------
async def test_a_queue_is_told_by_rank_with_the_tokens_of_its_requests(pool: PoolStore, clock: HandClock) -> None:
    await busy(pool, one_at_a_time())
    await hold(pool, "relaxed", slo_ms=50_000, tokens=100)
    await hold(pool, "urgent", slo_ms=30_000, tokens=200)
    clock.advance(7)

    told = await head(pool)

    assert told.now_ms == clock.now_ms
    assert told.load == (await pool.loads())["a"]
    assert told.entries == (
        ("urgent", clock.now_ms - 7 + 30_000, 200, 0),
        ("relaxed", clock.now_ms - 7 + 50_000, 100, 0),
    )
    assert await pool.queue_head("nobody") is None


async def test_of_a_long_queue_a_round_reads_the_head_alone(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    for number in range(5):
        await hold(pool, f"r{number}", slo_ms=30_000 + number)

    async def read(**limit: int) -> list[str]:
        queue = await pool.queues.queue("a", **limit)
        assert queue is not None
        return [request.request_id for request in queue.held]

    assert await read(limit=3) == ["r0", "r1", "r2"]
    assert await read() == ["r0", "r1", "r2", "r3", "r4"]


async def test_a_planner_is_told_no_more_than_a_plan_looks_at(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    for number in range(PLAN_LIMIT + 5):
        await hold(pool, f"r{number:03d}", slo_ms=60_000)

    assert await order_of(pool) == [f"r{number:03d}" for number in range(PLAN_LIMIT)]
    whole = await pool.queues.queue("a")
    assert whole is not None
    assert len(whole.held) == PLAN_LIMIT + 5


async def test_a_planner_is_told_of_the_first_late_ones_behind_a_long_queue(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    late = [f"late{number:02d}" for number in range(LATE_LIMIT + 2)]
    for name in late:
        await hold(pool, name, slo_ms=1)
    await commit(pool, *(PlanStep(name, DEFERRED_RANK_MS + number) for number, name in enumerate(late)))
    on_time = [f"r{number:03d}" for number in range(PLAN_LIMIT)]
    for name in on_time[:-3]:
        await hold(pool, name, slo_ms=60_000)
    assert await order_of(pool) == [*on_time[:-3], *late[:3]]

    for name in on_time[-3:]:
        await hold(pool, name, slo_ms=60_000)

    assert await order_of(pool) == [*on_time, *late[:LATE_LIMIT]]
    reply = await pool.commit(QueuePlan("a", 0, ()))
    assert reply.queue is not None
    assert [each.request_id for each in reply.queue.entries] == [*on_time, *late[:LATE_LIMIT]], "after a stale plan"


async def test_requests_of_one_rank_are_in_the_order_of_their_ids(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    for request_id in ("r1", "r10", "r0", "r1@x"):
        await hold(pool, request_id, slo_ms=60_000)

    assert await order_of(pool) == ["r0", "r1", "r10", "r1@x"]


# commits -----------------------------------------------------------------------------------------------------
async def test_a_plan_dispatches_its_requests_in_order_and_says_so(pool: PoolStore, clock: HandClock) -> None:
    await busy(pool, one_at_a_time())
    for request_id in ("one", "two", "three"):
        await hold(pool, request_id, slo_ms=60_000, replica_id=f"of-{request_id}")
    clock.advance(40)

    reply = await commit(pool, PlanStep("three"), PlanStep("one"))

    context_tokens = (await record(pool, "one")).context_tokens
    assert reply.grants == (
        Grant("three", "a", "of-three", 1, 400, running_requests=1, context_tokens=context_tokens),
        Grant("one", "a", "of-one", 1, 400, running_requests=2, context_tokens=2 * context_tokens),
    )
    granted = await record(pool, "three")
    assert (granted.state, granted.dispatched_ms) == (RequestState.DISPATCHED, clock.now_ms)
    assert reply.queue is None, "there is no more room"
    assert await order_of(pool) == ["two"]
    await assert_sums_hold(pool)


async def test_a_commit_is_told_the_queue_where_there_is_more_room(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time(dispatch_window_tokens=1000))
    for request_id in ("one", "two", "three"):
        await hold(pool, request_id, slo_ms=1)

    reply = await commit(pool, PlanStep("one"))

    assert reply.queue == await head(pool)


async def test_a_plan_of_an_older_version_changes_nothing_and_is_told_the_queue_as_it_is(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    await hold(pool, "one", slo_ms=60_000)
    version = (await head(pool)).load.version
    await hold(pool, "two", slo_ms=50_000)
    before = await pool.snapshot()

    reply = await commit(pool, PlanStep("one"), version=version)

    assert reply == CommitReply((), await head(pool))
    assert await pool.snapshot() == before


async def test_a_plan_for_an_instance_that_is_gone_does_nothing(pool: PoolStore) -> None:
    assert await pool.commit(QueuePlan("nobody", 1, (PlanStep("r"),))) == CommitReply()


async def test_steps_for_requests_that_are_not_held_there_are_left_out(pool: PoolStore) -> None:
    """No version lets such a plan through, unless somebody deleted records by hand."""
    running = await busy(pool, one_at_a_time())
    await busy(pool, one_at_a_time("b"))
    await hold(pool, "elsewhere", "b", slo_ms=60_000)
    await hold(pool, "here", slo_ms=60_000)

    reply = await commit(pool, PlanStep(running), PlanStep("gone"), PlanStep("elsewhere", 5), PlanStep("here"))

    assert [grant.request_id for grant in reply.grants] == ["here"]
    assert not (await record(pool, "elsewhere")).deferred
    await assert_sums_hold(pool)


async def test_a_request_is_counted_again_by_what_is_resident_when_it_goes(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    prefix = range(1000, 1003)
    for request_id, *rest in (("brings", 1), ("shares", 2), ("extends", 2, 3)):
        await hold(pool, request_id, slo_ms=60_000, chain=chain(*prefix, *rest))
    assert (await head(pool)).load.pending_tokens == 400 + 400 + 400 + 500, "none of them counts on another"

    reply = await commit(pool, PlanStep("brings"), PlanStep("extends"), PlanStep("shares"))

    granted = [(grant.request_id, grant.uncached_tokens) for grant in reply.grants]
    assert granted == [("brings", 400), ("extends", 200), ("shares", 100)]
    assert (await record(pool, "shares")).uncached_tokens == 100
    assert (await pool.observe(["a"], chain(*prefix, 2, 3))).loads["a"].hit_blocks == 5
    await assert_sums_hold(pool)


async def test_what_an_instance_lost_meanwhile_is_computed_again(pool: PoolStore) -> None:
    await pool.members.put_instance(one_at_a_time())
    await place(pool, "former", chain=CHAIN)
    held = await hold(pool, "held", slo_ms=60_000, chain=CHAIN)
    await pool.members.set_instance_state("a", InstanceState.DOWN)
    await pool.members.set_instance_state("a", InstanceState.READY)

    (granted,) = (await commit(pool, PlanStep("held"))).grants

    assert (held.uncached_tokens, granted.uncached_tokens) == (100, 400)
    await assert_sums_hold(pool)


# deferral ----------------------------------------------------------------------------------------------------
async def test_a_deferred_request_waits_behind_all_and_is_counted_apart(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    first = await hold(pool, "first", slo_ms=10_000)
    await hold(pool, "second", slo_ms=20_000)

    reply = await commit(pool, PlanStep("first", first.enqueued_ms + first.slo_ms + DEFERRED_RANK_MS))

    assert reply.grants == ()
    assert await order_of(pool) == ["second", "first"]
    deferred = await record(pool, "first")
    assert deferred.deferred
    assert (await head(pool)).load.deferred_tokens == 400
    await assert_sums_hold(pool)


async def test_new_requests_do_not_wait_for_what_a_plan_passed_over(pool: PoolStore) -> None:
    # given 800 tokens on each of two instances, all but 400 of them held
    for instance_id in ("a", "b"):
        await busy(pool, one_at_a_time(instance_id))
    await hold(pool, "passed-over", "a", slo_ms=60_000)
    await hold(pool, "waits", "b", slo_ms=60_000)

    await pool.commit(QueuePlan("a", (await head(pool)).load.version, (), passed_over_tokens=400))

    load = (await head(pool)).load
    assert (load.pending_tokens, load.deferred_tokens, load.overtaken_tokens) == (800, 0, 400)
    reply = await place(pool, "new", "b", "a", tokens=100, weights=Weights(PLAIN_TTFT, PLAIN_TTFT))
    assert reply.chosen.instance_id == "a"


async def test_what_a_plan_passed_over_and_has_left_is_overtaken_no_more(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    await hold(pool, "passed-over", slo_ms=60_000)
    await hold(pool, "waits", slo_ms=60_000, tokens=100)
    await pool.commit(QueuePlan("a", (await head(pool)).load.version, (), passed_over_tokens=400))

    await finish(pool, "passed-over")

    assert (await head(pool)).load.overtaken_tokens == 100, "no more than is held"
    await pool.commit(QueuePlan("a", (await head(pool)).load.version, ()))
    assert (await head(pool)).load.overtaken_tokens == 0, "as the next plan has it"


async def test_a_deferred_request_that_goes_is_none_any_more_and_its_grant_says_that_it_was(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    await hold(pool, "r", slo_ms=10_000)
    await commit(pool, PlanStep("r", DEFERRED_RANK_MS))

    reply = await commit(pool, PlanStep("r"))

    granted = await record(pool, "r")
    counts = {"running_requests": 1, "context_tokens": granted.context_tokens}
    assert reply.grants == (Grant("r", "a", "one", 1, 400, deferred=True, **counts),)
    assert (granted.state, granted.deferred) == (RequestState.DISPATCHED, False)
    assert (await head(pool)).load.deferred_tokens == 0


async def test_deferred_work_that_waits_for_memory_is_no_stall(pool: PoolStore, clock: HandClock) -> None:
    # given an instance whose running request leaves no room, and a deferred one that waits for it
    running = await busy(pool, one_at_a_time(max_running_requests=1))
    await first_token(pool, running, "a")
    await hold(pool, "late", slo_ms=1)
    await commit(pool, PlanStep("late", DEFERRED_RANK_MS))
    clock.advance(30_000)
    assert (await head(pool)).load.stalled_s == 0

    # when work comes that does not wait, the clock starts with it
    await hold(pool, "in time", slo_ms=LONG_MS)
    clock.advance(500)
    assert (await head(pool)).load.stalled_s == 0.5


# granting by replicas and the leader -------------------------------------------------------------------------
async def test_the_earliest_deadline_goes_first_and_the_leader_sweeps_what_no_replica_granted(pool: PoolStore) -> None:
    running = await busy(pool, one_at_a_time())
    for request_id, slo_ms in (("relaxed", 50_000), ("urgent", 30_000), ("normal", 40_000)):
        await hold(pool, request_id, slo_ms=slo_ms)

    assert await end(pool, running) == 1
    assert await dispatched(pool, ["relaxed", "urgent", "normal"]) == ["urgent"]
    await finish(pool, "urgent")
    assert await dispatched(pool, ["relaxed", "normal"]) == [], "its replica died before it planned"
    assert (await sweep(pool), await sweep(pool)) == (1, 0)
    assert await dispatched(pool, ["relaxed", "normal"]) == ["normal"]
    await assert_sums_hold(pool)


async def test_what_cannot_meet_its_deadline_is_deferred_and_goes_when_nothing_else_waits(
    pool: PoolStore, clock: HandClock
) -> None:
    running = await busy(pool, one_at_a_time())
    await hold(pool, "short of time", slo_ms=5_000)
    await hold(pool, "in time", slo_ms=30_000)
    clock.advance(1_001)

    assert await sweep(pool) == 0
    assert await order_of(pool) == ["in time", "short of time"]
    for request_id in (running, "in time"):
        assert await end(pool, request_id) == 1

    assert await dispatched(pool, ["short of time"]) == ["short of time"]
    await assert_sums_hold(pool)


async def test_a_planner_that_lost_the_race_plans_what_is_there_now(pool: PoolStore) -> None:
    running = await busy(pool, one_at_a_time(dispatch_window_tokens=400))
    await hold(pool, "one", slo_ms=7_500)
    stale = (await finish(pool, running)).queue
    await hold(pool, "urgent", slo_ms=7_000)

    assert await samples.grant(pool, stale, DEADLINE) == 1
    assert await dispatched(pool, ["one", "urgent"]) == ["urgent"]
    await assert_sums_hold(pool)


@pytest.mark.parametrize(("slo_ms", "calm"), [(8000, True), (7999, False)])
async def test_a_request_is_dispatched_beyond_the_window_where_all_work_meets_its_deadline(
    pool: PoolStore, slo_ms: int, calm: bool
) -> None:
    await busy(pool, one_at_a_time(dispatch_window_tokens=400))

    placed = await hold(pool, "next", slo_ms=slo_ms)

    assert placed.state is (RequestState.DISPATCHED if calm else RequestState.HELD)
    await assert_sums_hold(pool)


async def test_four_windows_are_dispatched_at_most_and_none_ahead_of_a_queue(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time(dispatch_window_tokens=400))
    placed = [await hold(pool, f"r{number}", slo_ms=60_000) for number in range(5)]

    assert [each.state for each in placed] == [RequestState.DISPATCHED] * 3 + [RequestState.HELD] * 2


@pytest.mark.parametrize(("slo_ms", "told"), [(8000, True), (7999, False)])
async def test_a_queue_is_told_where_its_head_meets_its_deadline_behind_all_work(
    pool: PoolStore, slo_ms: int, told: bool
) -> None:
    """Where one of two ends, the held one may go beyond the window, if all work is done by its deadline."""
    running = await busy(pool, one_at_a_time(dispatch_window_tokens=400))
    await pool.members.update_instance("a", {"max_running_requests": 2})
    await hold(pool, "runs", slo_ms=LONG_MS)
    await hold(pool, "held", slo_ms=slo_ms)

    queue = (await finish(pool, running)).queue

    assert (queue is not None) is told
    assert await samples.grant(pool, queue, DEADLINE) == int(told)


async def test_a_down_instance_is_granted_nothing_and_a_draining_one_finishes_its_queue(pool: PoolStore) -> None:
    running = await busy(pool, one_at_a_time())
    await hold(pool, "held", slo_ms=60_000)

    await pool.members.set_instance_state("a", InstanceState.DOWN)
    assert await end(pool, running) == 0
    assert await sweep(pool) == 0
    await pool.members.set_instance_state("a", InstanceState.DRAINING)
    assert await sweep(pool) == 1


async def test_a_wider_window_is_used_by_the_next_sweep(pool: PoolStore) -> None:
    await busy(pool, one_at_a_time())
    await hold(pool, "held", slo_ms=60_000)

    await pool.members.update_instance("a", {"dispatch_window_tokens": 800})

    assert await sweep(pool) == 1


# moves -------------------------------------------------------------------------------------------------------
async def one_held_on_a(pool: PoolStore, **changes: Any) -> StoredRequest:
    """Request ``r`` held on instance a, instance b being idle."""
    await busy(pool, one_at_a_time())
    await pool.members.put_instance(one_at_a_time("b", **changes))
    return await hold(pool, "r", "a", "b", chain=CHAIN, slo_ms=60_000)


async def whole(pool: PoolStore) -> HotQueue:
    queue = await pool.queues.queue("a")
    assert queue is not None
    return queue


async def test_a_whole_queue_is_told_with_the_loads_of_its_requests_alternatives(pool: PoolStore) -> None:
    held = await one_held_on_a(pool)
    later = await hold(pool, "later", slo_ms=90_000)

    queue = await whole(pool)

    assert queue.held == (held, later)
    assert queue.load.pending_tokens == 1200
    assert list(queue.alternatives) == ["b"]
    assert await pool.queues.queue("nobody") is None


async def test_a_moved_request_swaps_its_instances_and_its_queue_is_told_where_it_may_go(pool: PoolStore) -> None:
    held = await one_held_on_a(pool)
    await place(pool, "former", "b", chain=chain(*CHAIN.hashes[:3]))
    await finish(pool, "former")
    await commit(pool, PlanStep("r", DEFERRED_RANK_MS))

    moved = await pool.queues.migrate(held, "b", reason="benefit", fence=await lead(pool))

    assert moved == Migration("migrated", await head(pool, "b"))
    assert await record(pool, "r") == replace(
        held, instance_id="b", uncached_tokens=100, alternative_id="a", alternative_uncached_tokens=400
    )
    assert moved.queue is not None
    assert moved.queue.entries == (("r", held.enqueued_ms + held.slo_ms, 100, 0),)
    assert (await pool.snapshot()).migrations == {"benefit": 1}
    await assert_sums_hold(pool)
    assert await samples.grant(pool, moved.queue, DEADLINE) == 1
    assert (await record(pool, "r")).state is RequestState.DISPATCHED


async def test_a_moved_request_whose_chain_is_unknown_counts_its_whole_prompt(pool: PoolStore) -> None:
    held = replace(await one_held_on_a(pool), request_id="adopted", uncached_tokens=100)
    await pool.adopt([held])

    await pool.queues.migrate(held, "b", reason="evacuation", fence=await lead(pool))

    assert (await record(pool, "adopted")).uncached_tokens == 400
    await assert_sums_hold(pool)


async def test_what_is_not_held_there_or_cannot_go_there_stays(pool: PoolStore) -> None:
    held = await one_held_on_a(pool, max_queued_requests=0, max_running_requests=1)
    await pool.members.put_instance(instance("down", state=InstanceState.DOWN))
    await pool.members.put_instance(instance("decoder", role=Role.DECODE))
    await place(pool, "prefill", "a", leg=Leg.PREFILL, attempt=2)
    fence, before = await lead(pool), await pool.snapshot()

    async def status(request: StoredRequest, target_id: str) -> str:
        return (await pool.queues.migrate(request, target_id, reason="benefit", fence=fence)).status

    assert [
        await status(await record(pool, "busy-a"), "b"),
        await status(replace(held, request_id="unknown"), "b"),
        await status(replace(held, instance_id="b"), "a"),
        await status(held, "down"),
        await status(await record(pool, "prefill"), "decoder"),
        await status(held, "nobody"),
        await status(held, "a"),
        await status(held, "b"),
    ] == ["not_held"] * 3 + ["not_ready"] * 4 + ["queue_full"]
    assert (await pool.snapshot()).requests == before.requests


async def test_a_deposed_leader_moves_nothing(pool: PoolStore, clock: HandClock) -> None:
    held, fence = await one_held_on_a(pool), await lead(pool, lease_ms=1000)
    clock.advance(1000)

    with pytest.raises(LeaseLostError):
        await pool.queues.migrate(held, "b", reason="benefit", fence=fence)

    assert (await record(pool, "r")).instance_id == "a"


async def test_a_move_keeps_the_place_in_the_order_of_deadlines(pool: PoolStore, clock: HandClock) -> None:
    held = await one_held_on_a(pool)
    await busy(pool, one_at_a_time("b"))
    await hold(pool, "earlier", "b", slo_ms=59_000)
    clock.advance(5)
    await hold(pool, "later", "b", slo_ms=60_000)

    await pool.queues.migrate(held, "b", reason="rebalance", fence=await lead(pool))

    assert await order_of(pool, "b") == ["earlier", "r", "later"]


async def test_work_is_placed_where_a_queue_is_full_only_if_it_need_not_wait(pool: PoolStore) -> None:
    await pool.members.put_instance(one_at_a_time(max_queued_requests=0, dispatch_window_tokens=800))

    statuses = [(await place(pool, name)).status for name in ("one", "two", "three")]

    assert statuses == [PlaceStatus.DISPATCHED, PlaceStatus.DISPATCHED, PlaceStatus.QUEUE_FULL]


async def test_what_went_past_a_held_request_can_be_read_afterwards(pool: PoolStore, clock: HandClock) -> None:
    """By class and tenant, whoever made the plans; a move is followed to the other queue."""
    await busy(pool, one_at_a_time())
    await pool.members.put_instance(one_at_a_time("b"))
    slow = await hold(pool, "slow", "a", slo_ms=1000, tenant="acme", band=LEVELS)
    clock.advance(10)
    for name in ("one", "two"):
        await hold(pool, name, "a", slo_ms=LONG_MS, tenant="search", band=0)
    clock.advance(10)
    await commit(pool, PlanStep("one"), PlanStep("slow", DEFERRED_RANK_MS))
    clock.advance(10)
    fence = await lead(pool)
    await pool.queues.migrate(await record(pool, "slow"), "b", reason="idle", fence=fence)
    clock.advance(10)
    await commit(pool, PlanStep("two"))
    await commit(pool, PlanStep("slow"), instance_id="b")
    await finish(pool, "slow")

    first, second = await pool.queues.waits("slow", "a", 1000, slow.enqueued_ms, slow.enqueued_ms, None)

    assert (first.end, first.moved_to) == (WaitEnd.MOVED, "b")
    assert first.ahead == (WentAhead(0, "search", 1, 1),)
    assert first.deferral == Deferral(0.02, "", 4.0, 0.98)
    assert (second.instance_id, second.end, second.ahead) == ("b", WaitEnd.GRANTED, ())


async def test_a_request_that_is_placed_past_held_ones_is_in_the_log_of_the_queue(
    pool: PoolStore, clock: HandClock
) -> None:
    await pool.members.put_instance(one_at_a_time(dispatch_window_tokens=4096))
    await hold(pool, "fills", "a", band=LEVELS, fills=True)
    held = await hold(pool, "held", "a", band=LEVELS, fills=True)
    assert (await record(pool, "fills")).state is RequestState.DISPATCHED
    clock.advance(10)
    assert (await hold(pool, "first", "a", slo_ms=LONG_MS, band=0)).state is RequestState.DISPATCHED

    (wait,) = await pool.queues.waits("held", "a", 5000, held.enqueued_ms, held.enqueued_ms, None)

    assert wait.ahead == (WentAhead(0, "", 1, 1),)
