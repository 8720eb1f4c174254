"""The store contract: what tenants were given of the work, and where that puts their requests, on every backend."""

from __future__ import annotations

import asyncio
import math

import pytest

from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.queues.queue_order import (
    DEFERRED_RANK_MS,
    PlanStep,
    QueueEntry,
    QueueHead,
    QueueOrder,
    QueuePlan,
    plan_queue,
)
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.tenants.shares import (
    ACTIVE_S,
    GIVEN_WINDOW_S,
    HELD_WINDOW_S,
    LEVEL_STEP,
    NO_TENANT,
    SENT_WINDOW_S,
    Share,
)
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import (
    HandClock,
    assert_sums_hold,
    finish,
    first_token,
    hold,
    instance,
    place,
    record,
)

INSTANCES = 1
A_SHARE_TOKENS = round(SENT_WINDOW_S * 8000 / 2)
"""Prompt tokens that are half of what one instance prefills in the window of the books."""


@pytest.fixture(autouse=True)
async def members(pool: PoolStore) -> None:
    roomy = {"dispatch_window_tokens": 10**6, "max_running_requests": 1000, "max_queued_requests": 1000}
    await pool.members.put_instance(instance("a", **roomy, kv_capacity_tokens=50_000))


async def send(pool: PoolStore, name: str, tenant: str, tokens: int, weight: float = 1.0) -> int:
    """Place a request at once, and say in which band it is."""
    share = Share(tenant, weight, INSTANCES)
    assert (await place(pool, name, tokens=tokens, share=share, shares_as=tenant)).status is PlaceStatus.DISPATCHED
    return (await record(pool, name)).band


async def test_who_is_alone_is_within_its_share_whatever_it_sends(pool: PoolStore) -> None:
    assert [await send(pool, f"r{i}", "heavy", 10 * A_SHARE_TOKENS) for i in range(3)] == [0, 0, 0]
    await assert_sums_hold(pool)


async def test_who_sent_and_got_more_than_its_share_is_behind_those_who_did_not(pool: PoolStore) -> None:
    await send(pool, "first", "light", 100)
    assert await send(pool, "r1", "heavy", 2 * A_SHARE_TOKENS) == 0, "before it sent anything"

    assert await send(pool, "r2", "heavy", 4 * A_SHARE_TOKENS) > 0
    assert await send(pool, "second", "light", 100) == 0


async def test_a_burst_is_over_its_share_before_any_instance_has_worked_on_it(pool: PoolStore) -> None:
    await send(pool, "first", "light", 100)
    share = Share("burst", 1.0, INSTANCES)
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, max_queued_requests=1000))
    for i in range(3):
        await hold(pool, f"b{i}", tokens=A_SHARE_TOKENS, share=share, shares_as="burst")

    assert [(await record(pool, f"b{i}")).band for i in range(3)] == [0, 0, 1]
    await assert_sums_hold(pool)


async def test_a_placement_says_where_its_tenant_stood(pool: PoolStore) -> None:
    await send(pool, "first", "light", 100)
    await send(pool, "r1", "heavy", 2 * A_SHARE_TOKENS)
    share = Share("heavy", 1.0, INSTANCES)

    standing = (await place(pool, "r2", tokens=100, share=share, shares_as="heavy", tenant="heavy")).standing

    assert standing is not None
    assert standing.level == (await record(pool, "r2")).band > 0
    assert standing.sent_s == pytest.approx(SENT_WINDOW_S, rel=0.01)
    assert standing.share_s == pytest.approx(SENT_WINDOW_S / 2, rel=0.01)
    share = Share(NO_TENANT, 1.0, INSTANCES)
    assert (await place(pool, "r3", tokens=100, share=share, shares_as=NO_TENANT)).standing is None


async def test_each_tenants_part_of_the_work_is_read_beside_its_share(pool: PoolStore, clock: HandClock) -> None:
    await send(pool, "r1", "light", A_SHARE_TOKENS)
    await send(pool, "r2", "heavy", 3 * A_SHARE_TOKENS, weight=4.0)
    await finish(pool, "r1")
    await finish(pool, "r2")
    clock.advance(round(GIVEN_WINDOW_S * 1000))

    work = await pool.usage.work(["light", "heavy", "quiet"])

    assert set(work) == {"light", "heavy"}
    assert work["light"].given_s == pytest.approx(A_SHARE_TOKENS / 8000 / math.e, rel=0.01)
    assert (work["light"].part, work["heavy"].part) == pytest.approx((0.25, 0.75), rel=0.01)
    assert (work["light"].share, work["heavy"].share) == pytest.approx((0.2, 0.8))
    assert await pool.usage.work([]) == {}


async def test_the_work_of_requests_that_are_placed_or_end_in_one_call_adds_up(
    pool: PoolStore, clock: HandClock
) -> None:
    names = ("light", "heavy", "heavy")
    shares = [Share(name, 1.0, INSTANCES) for name in names]

    sent = [
        place(pool, f"r{number}", tokens=8000, share=share, shares_as=share.name) for number, share in enumerate(shares)
    ]
    assert all(reply.status is PlaceStatus.DISPATCHED for reply in await asyncio.gather(*sent))
    placed = await pool.usage.work(["light", "heavy"])
    clock.advance(1000)
    await pool.release([Release(f"r{number}") for number in range(3)])

    assert (placed["light"].given_s, placed["heavy"].given_s) == pytest.approx((1.0, 2.0), rel=0.01)
    left, memory_s = math.exp(-1 / GIVEN_WINDOW_S), 8050 / 50_000
    ended = await pool.usage.work(["light", "heavy"])
    assert ended["light"].given_s == pytest.approx(left + memory_s, rel=0.01)
    assert ended["heavy"].given_s == pytest.approx(2 * (left + memory_s), rel=0.01)
    assert ended["light"].part == pytest.approx(1 / 3, rel=0.01)


async def test_a_weight_is_a_part_of_the_fleet(pool: PoolStore) -> None:
    await send(pool, "first", "light", 100)
    assert await send(pool, "r1", "heavy", round(1.4 * A_SHARE_TOKENS), weight=3.0) == 0
    assert await send(pool, "r2", "heavy", 100, weight=3.0) == 0, "three quarters are its share"
    assert await send(pool, "r3", "heavy", 100, weight=1.0) > 0, "it is half now"


async def test_books_decay_and_who_is_quiet_is_forgotten(pool: PoolStore, clock: HandClock) -> None:
    await send(pool, "first", "light", 100)
    await send(pool, "r1", "heavy", 4 * A_SHARE_TOKENS)
    assert await send(pool, "r2", "heavy", 100) > 0
    await finish(pool, "r1")

    clock.advance(round(2 * SENT_WINDOW_S * 1000))
    await send(pool, "second", "light", 100)
    assert await send(pool, "r3", "heavy", 100) == 0
    clock.advance(round(ACTIVE_S * 1000) + 1)
    await send(pool, "r4", "heavy", 4 * A_SHARE_TOKENS)

    assert await send(pool, "r5", "heavy", 100) == 0, "it is alone"


async def test_the_memory_that_a_context_holds_is_work_while_it_holds_it(pool: PoolStore, clock: HandClock) -> None:
    async def given_s() -> float:
        return (await pool.usage.work(["acme"]))["acme"].given_s

    await send(pool, "first", "acme", 24_950)
    before_s, left = await given_s(), math.exp(-1 / GIVEN_WINDOW_S)

    clock.advance(1000)
    held_s = await given_s()
    assert held_s == pytest.approx(before_s * left + 0.5, rel=0.01), "half of the memory"
    await finish(pool, "first")
    assert await given_s() == pytest.approx(held_s, rel=1e-3)

    clock.advance(1000)
    assert await given_s() == pytest.approx(held_s * left, rel=1e-3)
    await send(pool, "second", "other", 100)
    assert (await pool.usage.work(["acme"]))["acme"].part > 0.95, "the sums of all count it as well"


async def test_memory_whose_end_was_lost_is_forgotten(pool: PoolStore, clock: HandClock) -> None:
    await send(pool, "first", "acme", 24_950)
    await pool.members.remove_instance("a")
    await finish(pool, "first")

    clock.advance(round(10 * HELD_WINDOW_S * 1000))

    assert (await pool.usage.work(["acme"]))["acme"].given_s < 0.01


async def test_who_comes_back_is_behind_those_above_their_shares_by_its_share_of_a_while_at_most(
    pool: PoolStore, clock: HandClock
) -> None:
    await send(pool, "first", "light", 100)
    await send(pool, "r1", "heavy", 8 * A_SHARE_TOKENS)
    await send(pool, "r2", "heavy", 100)

    assert await send(pool, "b1", "burst", A_SHARE_TOKENS) == 0, "before it sent anything"
    burst = await send(pool, "b2", "burst", 100)
    steady = await send(pool, "r3", "heavy", 100)

    share_s = SENT_WINDOW_S / 3
    given_s = (await pool.usage.work(["heavy"]))["heavy"].given_s
    levels = math.log(given_s / (given_s - share_s)) / math.log(LEVEL_STEP)
    assert steady - burst == pytest.approx(levels, abs=1.0)


async def test_a_tenant_within_its_share_is_not_late_for_what_yields_to_it(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, max_queued_requests=1000))
    await place(pool, "busy", tokens=100)
    heavy, light = Share("heavy", 1.0, INSTANCES), Share("light", 1.0, INSTANCES)
    await place(pool, "first", tokens=100, share=light, shares_as="light", rank_ms=5000, defers=True)
    for i in range(4):
        await hold(pool, f"r{i}", tokens=A_SHARE_TOKENS, share=heavy, shares_as="heavy", slo_ms=60_000)

    async def placed(name: str, share: Share) -> PlaceReply:
        about = {"rank_ms": 5000, "defers": True, "refuses": True, "share": share}
        return await place(pool, name, tokens=400, shares_as=share.name, slo_ms=15_000, **about)

    assert (await placed("more", heavy)).status is PlaceStatus.MISSED
    taken = await placed("second", light)
    assert taken.status is PlaceStatus.HELD
    assert taken.chosen.ttft_s < 15.0
    queue = await pool.queue_head("a")
    assert queue is not None
    assert [each.band > 0 for each in queue.entries] == sorted(each.band > 0 for each in queue.entries)
    await assert_sums_hold(pool)


async def test_the_memory_that_an_answer_took_on_an_instance_for_decoding_counts(
    pool: PoolStore, clock: HandClock
) -> None:
    await send(pool, "first", "acme", 100)
    await place(pool, "r1/decode", tokens=25_000, leg=Leg.DECODE, shares_as="acme")
    before = (await pool.usage.work(["acme"]))["acme"].given_s
    context_tokens = 25_000 + 2 * (await record(pool, "first")).expected_output_tokens + 100

    clock.advance(1000)

    given_s = (await pool.usage.work(["acme"]))["acme"].given_s
    assert given_s == pytest.approx(before * math.exp(-1 / GIVEN_WINDOW_S) + context_tokens / 50_000, rel=0.01)


async def test_a_band_stays_with_a_request_that_is_moved_and_deferred(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, max_queued_requests=1000))
    await pool.members.put_instance(instance("b", dispatch_window_tokens=1, max_queued_requests=1000))
    await place(pool, "busy", tokens=100)
    await place(pool, "other", "b", tokens=100)
    light, heavy = Share("light", 1.0, INSTANCES), Share("heavy", 1.0, INSTANCES)
    await hold(pool, "first", tokens=100, share=light, shares_as="light")
    for i in range(3):
        held = await hold(pool, f"r{i}", tokens=2 * A_SHARE_TOKENS, share=heavy, shares_as="heavy")
    assert held.band > 0
    queue = await pool.queue_head("a")
    assert queue is not None
    entry = queue.entries[-1]
    assert (entry.request_id, entry.band) == ("r2", held.band)

    step = PlanStep(entry.request_id, entry.place + DEFERRED_RANK_MS)
    await pool.commit(QueuePlan("a", queue.load.version, (step,)))
    deferred = await record(pool, "r2")
    assert (deferred.deferred, deferred.band) == (True, held.band)
    await assert_sums_hold(pool)


async def test_what_fills_idle_room_waits_deferred_and_nobody_waits_for_it(pool: PoolStore) -> None:
    fills = {"band": 48, "fills": True, "rank_ms": 5000, "defers": True}
    assert (await place(pool, "idle", tokens=400, **fills)).status is PlaceStatus.DISPATCHED

    assert (await place(pool, "filler", tokens=400, **fills)).status is PlaceStatus.HELD
    assert (await record(pool, "filler")).deferred
    await assert_sums_hold(pool)
    first = await place(pool, "first", tokens=400, band=0, rank_ms=5000, defers=True)
    assert first.status is PlaceStatus.DISPATCHED, "though one is held"

    queue = await pool.queue_head("a")
    assert queue is not None
    assert [(entry.request_id, entry.band, entry.deferred) for entry in queue.entries] == [("filler", 48, True)]


@pytest.mark.parametrize(("sender", "status"), [("heavy", PlaceStatus.HELD), ("new", PlaceStatus.DISPATCHED)])
async def test_who_got_more_than_its_share_does_not_go_past_what_is_late_without_a_plan(
    pool: PoolStore, sender: str, status: PlaceStatus
) -> None:
    # given a late request of a tenant within its share, and room beside what is dispatched
    slow = {"prefill_tokens_per_s": 1000.0, "max_queued_requests": 1000}
    await pool.members.put_instance(instance("b", dispatch_window_tokens=4096, **slow))
    classed = {"band": 0, "rank_ms": 600_000, "slo_ms": 600_000, "defers": True}
    light, heavy, new = [
        {"share": Share(name, 1.0, INSTANCES), "shares_as": name} for name in ("light", "heavy", "new")
    ]
    await place(pool, "light", "b", tokens=10, **light, **classed)
    for number in range(3):
        await place(pool, f"heavy{number}", "b", tokens=4000, **heavy, **classed)
    await place(pool, "late", "b", tokens=3000, **light, **{**classed, "slo_ms": 1, "rank_ms": 1})
    queue = await pool.queue_head("b")
    assert queue is not None
    (late,) = queue.entries
    deferred = PlanStep("late", late.place + DEFERRED_RANK_MS)
    await pool.commit(QueuePlan("b", queue.load.version, (deferred,)))
    for name in ("light", "heavy0", "heavy1"):
        await first_token(pool, name, "b")

    placed = await place(pool, "next", "b", tokens=10, **(heavy if sender == "heavy" else new), **classed)

    assert placed.status is status
    await assert_sums_hold(pool)


async def test_what_is_late_goes_by_a_plan_where_others_wait_though_its_instance_is_idle(pool: PoolStore) -> None:
    classed = {"tokens": 400, "rank_ms": 5000, "defers": True}
    await place(pool, "busy", band=48, **classed)
    assert (await place(pool, "filler", band=48, fills=True, **classed)).status is PlaceStatus.HELD
    await first_token(pool, "busy", "a")

    late = await place(pool, "late", band=0, slo_ms=1, **classed)

    assert late.status is PlaceStatus.HELD
    assert late.queue is not None
    assert [(entry.request_id, entry.band) for entry in late.queue.entries] == [("late", 0), ("filler", 48)]
    await assert_sums_hold(pool)


async def test_what_fills_idle_room_is_dispatched_at_once_where_a_plan_would_dispatch_it(
    pool: PoolStore, clock: HandClock
) -> None:
    band = 48
    await pool.members.put_instance(instance("a", max_running_requests=3, kv_capacity_tokens=50_000))

    async def goes_at_once(name: str, tokens: int) -> bool:
        """Place it while nothing is held, compare with the plan for it alone, and take it away where it is held."""
        load = (await pool.loads())["a"]
        entry = QueueEntry(name, DEFERRED_RANK_MS + clock.now_ms + 5000, tokens, band)
        plan = plan_queue(QueueHead(clock.now_ms, load, (entry,)), QueueOrder(True, math.inf, fills_from=band))
        reply = await place(pool, name, tokens=tokens, band=band, fills=True, rank_ms=5000, defers=True)
        assert (reply.status is PlaceStatus.DISPATCHED) == (PlanStep(name) in plan.steps)
        if reply.status is PlaceStatus.HELD:
            await finish(pool, name)
        return reply.status is PlaceStatus.DISPATCHED

    assert await goes_at_once("long", 40_000), "nothing runs"
    assert not await goes_at_once("behind", 100), "it prefills"
    await finish(pool, "long")
    assert await goes_at_once("short", 350)
    await first_token(pool, "short", "a")
    half = 25_000 - (await pool.loads())["a"].context_tokens
    assert not await goes_at_once("more", half + 1), "more than half of the memory"
    assert await goes_at_once("half", half)
    await first_token(pool, "half", "a")
    assert not await goes_at_once("another", 1), "half of the memory is taken"
    await finish(pool, "half")
    for name in ("second", "third"):
        assert await goes_at_once(name, 100)
        await first_token(pool, name, "a")
    assert not await goes_at_once("fourth", 100), "as many run as may"
