"""The store contract: placements, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights, features_of
from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.state.instance import InstanceState, Role
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import (
    BLOCK_TOKENS,
    CHAIN,
    LEAST_TTFT,
    SCHEDULING,
    HandClock,
    assert_sums_hold,
    chain,
    finish,
    first_token,
    instance,
    lead,
    own_chain,
    place,
    placement,
    record,
)


async def statuses(pool: PoolStore, *request_ids: str, **changes: object) -> list[PlaceStatus]:
    return [(await place(pool, request_id, **changes)).status for request_id in request_ids]


# room --------------------------------------------------------------------------------------------------------
async def test_a_request_is_dispatched_while_dispatched_tokens_are_under_the_window(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=800))

    assert await statuses(pool, "r1", "r2", "r3", "r4") == ["dispatched", "dispatched", "held", "held"]
    await assert_sums_hold(pool)


async def test_running_requests_are_limited_even_when_their_prefill_is_done(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", max_running_requests=1))
    await place(pool, "running")
    await first_token(pool, "running", "a")

    assert await statuses(pool, "waiting") == ["held"]
    await assert_sums_hold(pool)


async def test_a_request_does_not_overtake_those_that_wait_although_there_is_room(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    await statuses(pool, "sent", "waiting")
    told = await finish(pool, "sent")

    reply = await place(pool, "next")

    assert told.queue is not None
    assert reply.status is PlaceStatus.HELD
    assert reply.queue is not None, "the caller that is told plans the queue"
    assert [entry.request_id for entry in reply.queue.entries] == ["next", "waiting"]


@pytest.mark.parametrize(
    ("short_of_tokens", "changes", "status"),
    [
        (0, {}, PlaceStatus.DISPATCHED),
        (1, {}, PlaceStatus.HELD),
        (1, {"defers": False}, PlaceStatus.DISPATCHED),
        (1, {"chain": chain(7)}, PlaceStatus.DISPATCHED),  # not long
    ],
)
async def test_by_deadline_a_long_prompt_is_held_until_it_fits_beside_what_runs(
    pool: PoolStore, short_of_tokens: int, changes: dict[str, Any], status: PlaceStatus
) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=10_000, kv_capacity_tokens=1000))
    first = await place(pool, "runs", chain=chain(*range(20, 29)), defers=True)
    fits_tokens = (await pool.loads())["a"].context_tokens + 400
    await pool.members.update_instance("a", {"kv_capacity_tokens": fits_tokens - short_of_tokens})

    asked = {"chain": chain(31, 32, 33, 34), "defers": True} | changes

    assert first.status is PlaceStatus.DISPATCHED, "nothing runs that would leave room later"
    assert (await place(pool, "asks", **asked)).status is status
    await assert_sums_hold(pool)


async def test_a_full_queue_refuses_new_requests_but_no_retries(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, max_queued_requests=1))
    await statuses(pool, "sent", "held")

    refused = await place(pool, "new")
    retried = await place(pool, "retried", attempt=2)

    assert (refused.status, refused.chosen.instance_id) == (PlaceStatus.QUEUE_FULL, "a")
    assert retried.status is PlaceStatus.HELD
    assert "new" not in await pool.records(["new"])
    await assert_sums_hold(pool)


# what is placed ----------------------------------------------------------------------------------------------
async def test_a_placed_request_is_read_back_as_it_was_asked(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1))
    asked = placement("sent", chain=CHAIN, slo_ms=1234, replica_id="two").request
    reply = await place(pool, "sent", chain=CHAIN, slo_ms=1234, replica_id="two")
    await place(pool, "held", chain=CHAIN)

    sent, held = await record(pool, "sent"), await record(pool, "held")

    assert sent == replace(
        asked,
        instance_id="a",
        state=RequestState.DISPATCHED,
        uncached_tokens=400,
        enqueued_ms=clock.now_ms,
        dispatched_ms=clock.now_ms,
    )
    assert (reply.enqueued_ms, reply.chosen.uncached_tokens) == (clock.now_ms, 400)
    assert (held.state, held.dispatched_ms, held.uncached_tokens) == (RequestState.HELD, 0, 100)


async def test_a_retry_keeps_the_time_of_its_first_reservation(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))
    first = await place(pool, "r")
    await finish(pool, "r", attempt=1)
    clock.advance(1500)

    second = await place(pool, "r", attempt=2, enqueued_ms=first.enqueued_ms)

    assert second.enqueued_ms == first.enqueued_ms
    assert (await record(pool, "r")).enqueued_ms == first.enqueued_ms


async def test_the_reply_tells_versions_and_loads_before_the_reservation(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    await place(pool, "before", "a")

    reply = await place(pool, "r", "a", "b", "nobody")

    assert (reply.seen.epoch, reply.seen.tree_version) == (2, 0)
    assert {name: load.pending_tokens for name, load in reply.seen.loads.items()} == {"a": 400, "b": 0}


async def test_the_second_best_is_its_alternative_with_what_it_would_compute_there(pool: PoolStore) -> None:
    for name in ("a", "b", "c"):
        await pool.members.put_instance(instance(name))
    await place(pool, "root", "b", chain=chain(*CHAIN.hashes[:2]))
    await place(pool, "else", "c", tokens=800)

    reply = await place(pool, "r", "a", "b", "c", chain=CHAIN, weights=LEAST_TTFT)

    placed = await record(pool, "r")
    assert (placed.instance_id, placed.alternative_id, placed.alternative_uncached_tokens) == ("a", "b", 200)
    assert (reply.chosen.instance_id, reply.chosen.alternative_id) == ("a", "b")


async def test_a_reply_tells_the_hits_and_the_ttft_that_the_weights_expect(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    await place(pool, "root", "b", chain=chain(*CHAIN.hashes[:2]))
    await place(pool, "busy", "a", tokens=3000)

    reply = await place(pool, "r", "a", "b", chain=CHAIN, weights=LEAST_TTFT)
    nowhere = await place(pool, "s", "gone", weights=LEAST_TTFT)

    assert (reply.chosen.instance_id, reply.seen.hits) == ("b", {"a": 0, "b": 2})
    assert {name: load.hit_blocks for name, load in reply.seen.loads.items()} == reply.seen.hits
    features = features_of(reply.seen.loads["b"], CHAIN, SCHEDULING.decode_stall_s)
    assert reply.chosen.ttft_s == pytest.approx(LEAST_TTFT.ttft.of(features))
    assert reply.chosen.ttft_s > 0
    assert (reply.chosen.running_requests, reply.chosen.context_tokens) == (1, reply.seen.loads["b"].context_tokens)
    assert reply.chosen.context_tokens > 0
    assert (nowhere.status, nowhere.chosen.ttft_s, nowhere.seen.hits) == (PlaceStatus.NOT_READY, 0.0, {})


# weights -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("weights", "taken"),
    [
        (Form(ahead_s=1.0), "idle"),
        (Form(uncached_tokens=1.0), "cached"),
        (Form(compute_s=1.0), "cached"),
        (Form(kv_demand=1.0), "cached"),
        (Form(attention_pairs=1.0), "cached"),
        (Form(kv_demand=-1.0), "idle"),
        (Form(ahead_s=1.0, compute_s=5.0), "cached"),
        (Form(crowded_compute_s=-1.0), "idle"),
        (Form(), "cached"),
    ],
)
async def test_the_least_weighted_sum_is_taken(pool: PoolStore, weights: Form, taken: str) -> None:
    # given two seconds of work beside the prefix, and a running context elsewhere
    for name in ("cached", "idle"):
        await pool.members.put_instance(
            instance(name, prefill_tokens_per_s=200.0, kv_capacity_tokens=2000, dispatch_window_tokens=2000)
        )
    await place(pool, "before", "cached", chain=CHAIN)
    await place(pool, "running", "idle")
    await first_token(pool, "running", "idle")
    await place(pool, "running too", "idle")
    await first_token(pool, "running too", "idle")

    reply = await place(pool, "r", "cached", "idle", chain=CHAIN, weights=Weights(weights, PLAIN_TTFT))

    assert reply.chosen.instance_id == taken


@pytest.mark.parametrize(("slo_ms", "taken"), [(2500, "cached"), (2499, "idle")])
async def test_a_missed_slo_costs_what_the_weights_say(pool: PoolStore, slo_ms: int, taken: str) -> None:
    # given 2 s of work ahead and 0.5 s of its own beside the prefix
    for name in ("cached", "idle"):
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=200.0))
    await place(pool, "before", "cached", chain=CHAIN)
    weights = Weights(Form(uncached_tokens=1.0), PLAIN_TTFT, missed=Form(constant=1000.0))

    reply = await place(pool, "r", "cached", "idle", chain=CHAIN, weights=weights, slo_ms=slo_ms)

    assert reply.chosen.instance_id == taken


@pytest.mark.parametrize(("stalled_ms", "taken"), [(2999, "stalled"), (3000, "other")])
async def test_a_decode_stall_counts_once_it_is_long_enough(
    pool: PoolStore, clock: HandClock, stalled_ms: int, taken: str
) -> None:
    for name in ("stalled", "other"):
        await pool.members.put_instance(instance(name))
    await place(pool, "before", "stalled", tokens=100)
    await place(pool, "before too", "other", tokens=400)
    clock.advance(stalled_ms)
    await first_token(pool, "before too", "other")
    await place(pool, "ahead", "other", tokens=400)

    reply = await place(pool, "r", "stalled", "other", weights=LEAST_TTFT)

    assert reply.chosen.instance_id == taken


async def test_published_prefill_rates_are_weighed_with(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    await pool.publications.publish_learned(Learned(), {"a": 100.0, "b": 0.1 + 0.2}, fence=await lead(pool))
    assert (await pool.loads())["b"].prefill_tokens_per_s == 0.1 + 0.2
    await pool.publications.publish_learned(Learned(), {"b": 101.0}, fence=await lead(pool))

    assert (await place(pool, "r", "a", "b", weights=LEAST_TTFT)).chosen.instance_id == "b"


# what does not hold ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", [InstanceState.STARTING, InstanceState.DRAINING, InstanceState.DOWN])
async def test_only_ready_instances_take_new_requests(pool: PoolStore, state: InstanceState) -> None:
    await pool.members.put_instance(instance("a", state=state))

    reply = await place(pool, "r", "a", "nobody")

    assert (reply.status, reply.chosen.instance_id) == (PlaceStatus.NOT_READY, None)
    assert (await pool.snapshot()).requests == ()


async def test_a_placement_is_stale_when_more_is_pending_than_the_choice_holds_for(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "before")

    within = await place(pool, "r1", max_pending_tokens=400)
    beyond = await place(pool, "r2", max_pending_tokens=799)

    assert (within.status, beyond.status, beyond.chosen.instance_id) == (PlaceStatus.DISPATCHED, PlaceStatus.STALE, "a")
    assert beyond.seen.loads["a"].pending_tokens == 800
    assert "r2" not in await pool.records(["r2"])
    await assert_sums_hold(pool)


@pytest.mark.parametrize(("slo_ms", "status"), [(100, PlaceStatus.DISPATCHED), (99, PlaceStatus.MISSED)])
async def test_a_placement_can_refuse_what_would_miss_its_slo(
    pool: PoolStore, slo_ms: int, status: PlaceStatus
) -> None:
    await pool.members.put_instance(instance("a", prefill_tokens_per_s=4000.0))

    reply = await place(pool, "r", slo_ms=slo_ms, refuses=True)

    assert (reply.status, reply.chosen.instance_id) == (status, "a")


async def test_what_would_miss_its_slo_is_held_back_unless_the_instance_is_idle(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", prefill_tokens_per_s=100.0))

    assert await statuses(pool, "idle", "late", slo_ms=10, defers=True) == ["dispatched", "held"]
    assert await statuses(pool, "behind", slo_ms=60_000, defers=True) == ["held"]


async def test_a_repeated_placement_is_told_what_stands(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    first = [await place(pool, name) for name in ("sent", "held")]

    again = [await place(pool, name) for name in ("sent", "held")]

    assert [reply.status for reply in again] == [reply.status for reply in first] == ["dispatched", "held"]
    assert [reply.chosen.uncached_tokens for reply in again] == [400, 400]
    assert (await pool.loads())["a"].pending_tokens == 800
    await assert_sums_hold(pool)


async def test_a_repeated_placement_that_has_moved_is_told_where_it_is(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, dispatch_window_tokens=1))
        await place(pool, f"first-on-{name}", name)
    await place(pool, "r", "a")
    await pool.queues.migrate(await record(pool, "r"), "b", reason="rebalance", fence=await lead(pool))

    reply = await place(pool, "r", "a")

    assert (reply.status, reply.chosen.instance_id, list(reply.seen.loads)) == (PlaceStatus.HELD, "b", ["b"])


@pytest.mark.parametrize("other", [{"replica_id": "two"}, {"attempt": 2}])
async def test_another_live_request_of_the_same_id_is_left_alone(pool: PoolStore, other: dict[str, object]) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")
    before = await record(pool, "r")

    reply = await place(pool, "r", **other)

    assert reply.status is PlaceStatus.DUPLICATE
    assert await record(pool, "r") == before
    await assert_sums_hold(pool)


async def test_an_expected_miss_can_ask_for_a_rebalance_and_each_wish_is_handed_out_once(
    pool: PoolStore, clock: HandClock
) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=100.0, max_queued_requests=9))
    await place(pool, "on time", "a", rebalances=True)
    await place(pool, "late", "b", rebalances=True, slo_ms=1)
    clock.advance(1)
    await place(pool, "late too", "a", rebalances=True, slo_ms=1)
    await place(pool, "late again", "b", rebalances=True, slo_ms=1)
    await place(pool, "not asked", "b", slo_ms=1)

    assert list(await pool.queues.wanted_rebalances(5)) == ["b", "a"]
    assert list(await pool.queues.wanted_rebalances(0)) == []


async def test_where_both_candidates_are_late_both_are_rebalanced(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=100.0, max_queued_requests=9))

    await place(pool, "late", "a", "b", rebalances=True, slo_ms=1)

    assert sorted(await pool.queues.wanted_rebalances(5)) == ["a", "b"]


# beyond those named ------------------------------------------------------------------------------------------
LEAST_COST = Weights(Form(ahead_s=1.0, kv_demand=4.0, compute_s=3.0), PLAIN_TTFT)


async def beyond(pool: PoolStore, request_id: str, *named: str, **changes: object) -> PlaceReply:
    changes = {"weights": LEAST_COST, "chain": CHAIN, **changes}
    return await place(pool, request_id, *named, beyond_from_s=0.0, **changes)


async def busy_pair_and_others(pool: PoolStore, *others: str) -> None:
    """``a`` with four seconds of work, and others with none."""
    for name in ("a", *others):
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=100.0, max_queued_requests=9))
    await place(pool, "ahead", "a")


async def test_the_least_loaded_is_weighed_where_it_could_cost_less(pool: PoolStore) -> None:
    await busy_pair_and_others(pool, "b")

    reply = await beyond(pool, "r", "a")

    assert (reply.status, reply.chosen.instance_id, list(reply.seen.loads)) == (PlaceStatus.DISPATCHED, "b", ["a", "b"])


async def test_those_that_cannot_cost_less_are_not_weighed(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=100.0))

    reply = await beyond(pool, "r", "a")

    assert (reply.chosen.instance_id, list(reply.seen.loads)) == ("a", ["a"])


@pytest.mark.parametrize(("disk_ms", "weighed"), [(3000, ["a", "b"]), (5000, ["a"])])
async def test_a_request_leaves_its_adapter_where_a_load_costs_less(
    pool: PoolStore, disk_ms: int, weighed: list[str]
) -> None:
    for name in ("a", "b"):
        room = {"adapter_slots": 1, "adapter_host_slots": 1, "adapter_disk_ms": disk_ms}
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=100.0, max_queued_requests=9, **room))
    await place(pool, "ahead", "a", adapter="one")

    weights = Weights(LEAST_COST.cost._replace(adapter_disk_s=1.0), PLAIN_TTFT)
    reply = await beyond(pool, "r", "a", adapter="one", weights=weights)

    assert list(reply.seen.loads) == weighed


async def test_the_instance_that_was_last_given_the_prefix_is_weighed_first(pool: PoolStore) -> None:
    long = own_chain("long", 2500)
    await busy_pair_and_others(pool, "b", "c", "d")
    await place(pool, "more", "a")
    for name, head in (("b", 1000), ("d", 2100)):
        await place(pool, f"before on {name}", name, chain=replace(long, hashes=long.hashes[: head // 100]))
        await first_token(pool, f"before on {name}", name)

    reply = await beyond(pool, "r", "a", chain=long)

    assert list(reply.seen.loads)[:2] == ["a", "d"], "the deepest sample counts"
    assert reply.chosen.instance_id == "d"


async def test_an_instance_that_holds_the_prefix_and_is_least_loaded_is_weighed_once(pool: PoolStore) -> None:
    await busy_pair_and_others(pool, "b")
    await place(pool, "before", "b", chain=CHAIN)
    await finish(pool, "before")

    assert list((await beyond(pool, "r", "a")).seen.loads) == ["a", "b"]


async def test_a_holder_that_takes_no_requests_is_not_weighed(pool: PoolStore) -> None:
    await busy_pair_and_others(pool, "b")
    await place(pool, "before", "b", chain=CHAIN)
    await pool.members.set_instance_state("b", InstanceState.DRAINING)

    reply = await beyond(pool, "r", "a")

    assert (reply.status, list(reply.seen.loads)) == (PlaceStatus.DISPATCHED, ["a"])


@pytest.mark.parametrize("holder", ["b", "c"])
async def test_an_excluded_instance_is_not_weighed(pool: PoolStore, holder: str) -> None:
    await busy_pair_and_others(pool, "b", "c")
    await place(pool, "before", holder, chain=CHAIN)
    await finish(pool, "before")

    reply = await beyond(pool, "r", "a", excluded=frozenset({"b"}))

    assert list(reply.seen.loads) == ["a", "c"]


async def test_a_prefix_is_found_at_its_last_full_block_though_it_is_no_multiple_of_the_stride(
    pool: PoolStore,
) -> None:
    await busy_pair_and_others(pool, "b", "c", "d")
    for name in ("c", "d"):
        await pool.members.update_instance(name, {"role": Role.DECODE})
    await place(pool, "before", "b", chain=chain(*CHAIN.hashes[:3], prompt_tokens=350))
    await place(pool, "more", "b", tokens=100)

    other = await beyond(pool, "other", "a", chain=chain(1, 2, 3))
    reply = await beyond(pool, "r", "a", chain=chain(*CHAIN.hashes[:3], prompt_tokens=399))

    assert (list(reply.seen.loads), list(other.seen.loads)) == (["a", "b"], ["a"])


async def test_the_least_loaded_are_ranked_by_what_they_have_to_do(pool: PoolStore) -> None:
    # given 4 s of prefill, 0.1 KV memories of running context at 4 s each, an idle one, and one that decodes
    for name in ("busy", "crowded", "idle"):
        await pool.members.put_instance(instance(name, prefill_tokens_per_s=100.0, kv_capacity_tokens=4500))
    await pool.members.put_instance(instance("decoder", role=Role.DECODE))
    await place(pool, "waits", "busy")
    await place(pool, "decodes", "crowded")
    await first_token(pool, "decodes", "crowded")
    dearer = Weights(Form(ahead_s=1.0, kv_demand=40.0, compute_s=0.1), PLAIN_TTFT)

    reply = await beyond(pool, "r", "busy", weights=dearer, excluded=frozenset({"idle"}))
    other = await beyond(pool, "other", "busy", weights=dearer, chain=chain(1, 2, 3, 4))

    assert list(reply.seen.loads) == ["busy", "crowded"]
    assert list(other.seen.loads) == ["busy", "idle"]


# KV metadata -------------------------------------------------------------------------------------------------
async def hits(pool: PoolStore, *hashes: int) -> int:
    return (await pool.observe(["a"], chain(*hashes))).loads["a"].hit_blocks


async def test_kv_metadata_stays_within_capacity_and_evicts_leaves_first(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", kv_capacity_tokens=500, dispatch_window_tokens=10_000))
    await place(pool, "old", chain=chain(1, 2, 3))
    await place(pool, "shares the root", chain=chain(1, 20, 21))
    before = [await hits(pool, 1, 2, 3), await hits(pool, 1, 20, 21)]

    await place(pool, "new", chain=chain(7, 8))

    assert before == [3, 3]
    assert [await hits(pool, 1, 2, 3), await hits(pool, 1, 20, 21), await hits(pool, 7, 8)] == [1, 3, 2]
    assert (await pool.loads())["a"].cached_blocks == 5
    await place(pool, "one more", chain=chain(9))
    assert (await pool.loads())["a"].cached_blocks == 5


@pytest.mark.parametrize(("kv_capacity_tokens", "kept"), [(300, 3), (99, 0), (1_000_000, 1200)])
async def test_a_chain_is_entered_as_far_as_the_cache_goes(pool: PoolStore, kv_capacity_tokens: int, kept: int) -> None:
    await pool.members.put_instance(instance("a", kv_capacity_tokens=kv_capacity_tokens))
    long = range(2**64 - 1201, 2**64 - 1)

    await place(pool, "r", chain=chain(*long))

    assert await hits(pool, *long) == kept
    assert (await pool.loads())["a"].cached_blocks == kept


async def test_the_tokens_of_a_block_are_those_of_the_chain(pool: PoolStore) -> None:
    """Text is cut by bytes: a block has as many tokens as the learned ratio says."""
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1, kv_capacity_tokens=500))
    wide = replace(CHAIN, block_tokens=2 * BLOCK_TOKENS, prompt_tokens=8 * BLOCK_TOKENS)
    sent = await place(pool, "sent", chain=wide)
    held = await place(pool, "held", chain=replace(wide, prompt_tokens=900))

    assert (sent.chosen.uncached_tokens, held.chosen.uncached_tokens) == (800, 500)
    assert (await pool.loads())["a"].cached_blocks == 2


@pytest.mark.parametrize(("defers", "tokens"), [(True, 400), (False, 100)])
async def test_what_is_only_reserved_draws_requests_but_counts_for_those_alone_that_surely_go_after_it(
    pool: PoolStore, defers: bool, tokens: int
) -> None:
    """By deadline a request may go before the one that is to bring its prefix; first come, first served none does."""
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    await place(pool, "running")
    await place(pool, "brings", chain=CHAIN)

    shares = await place(pool, "shares", chain=CHAIN, defers=defers)
    for request_id in ("brings", "shares", "running"):
        await finish(pool, request_id)
    alone = await place(pool, "alone", chain=CHAIN)

    assert (shares.status, shares.seen.loads["a"].hit_blocks, shares.chosen.uncached_tokens) == (
        PlaceStatus.HELD,
        4,
        tokens,
    )
    assert (alone.status, alone.seen.loads["a"].hit_blocks, alone.chosen.uncached_tokens) == (
        PlaceStatus.DISPATCHED,
        4,
        400,
    )


async def test_what_is_not_to_be_held_is_sent_however_full_the_window_is_until_enough_requests_run(
    pool: PoolStore,
) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400, max_running_requests=3))

    assert await statuses(pool, "one", "two", "three", "four", at_once=True) == [*["dispatched"] * 3, "held"]
    await assert_sums_hold(pool)


async def test_none_beyond_the_candidates_is_taken_that_does_not_list_the_name_that_is_asked_for(
    pool: PoolStore,
) -> None:
    await busy_pair_and_others(pool, "b", "c")
    await pool.members.update_instance("b", {"models": {"qwen": ""}})
    await place(pool, "before", "b", chain=CHAIN)  # and "b" holds the prefix

    named = await beyond(pool, "r1", "a", model='the "sql" \\ adapter')
    await pool.members.update_instance("c", {"models": {"qwen": "", 'the "sql" \\ adapter': "qwen"}})
    listed = await beyond(pool, "r2", "a", model='the "sql" \\ adapter')
    any_name = await beyond(pool, "r3", "a")

    assert "b" not in named.seen.loads and named.chosen.instance_id == "c", "a list that is not known has every name"
    assert "b" not in listed.seen.loads
    assert "b" in any_name.seen.loads
    assert (await record(pool, "r1")).model == 'the "sql" \\ adapter'


async def test_a_prompt_of_millions_of_tokens_is_placed_and_found_again(pool: PoolStore) -> None:
    """A command of a script takes no more than some thousand words."""
    blocks = 90_000
    await pool.members.put_instance(instance("a", kv_capacity_tokens=10**8, dispatch_window_tokens=10**8))
    prompt = chain(*range(1, blocks + 1))
    await place(pool, "first", chain=prompt)
    again = await place(pool, "again", chain=prompt)

    assert again.seen.loads["a"].hit_blocks == blocks
