"""The store contract: the life of a request, on every backend."""

from __future__ import annotations

import asyncio

import pytest

from scheduling.instance import InstanceState, Role
from scheduling.ttft_model import PRIOR_WEIGHTS, TtftFeatures, modelled_ttft_s
from statestore.base import FinishFacts, Grant, PoolStore, RequestRecord, RequestState
from statestore.reservation import ReserveOutcome, ReserveStatus
from tests.statestore.samples import CHAIN, HandClock, chain, instance, reservation

DISPATCHED = ReserveOutcome(ReserveStatus.DISPATCHED)


async def assert_sums_hold(pool: PoolStore, aside_tokens: int = 0) -> None:
    """Pending tokens of every instance are the sum over its queued and dispatched requests; behind are those that
    stepped behind and, over all instances, ``aside_tokens`` that plans set aside."""
    view = await pool.snapshot()
    for instance_id, load in view.loads.items():
        mine = [request for request in view.requests if request.instance_id == instance_id]
        waiting = [request for request in mine if request.state is not RequestState.PREFILLED]
        sent = [request for request in mine if request.state is not RequestState.HELD]
        dispatched = [request for request in mine if request.state is RequestState.DISPATCHED]
        assert load.pending_tokens == sum(request.uncached_tokens for request in waiting)
        assert load.dispatched_tokens == sum(request.uncached_tokens for request in dispatched)
        assert load.context_tokens == sum(request.prompt_tokens + request.expected_output_tokens for request in sent)
        assert load.running_requests == len(sent)
        assert load.queued_requests == len(mine) - len(sent)
    late = [request for request in view.requests if request.late and request.state is RequestState.HELD]
    late_tokens = sum(request.uncached_tokens for request in late)
    assert sum(load.behind_tokens for load in view.loads.values()) == late_tokens + aside_tokens


async def record(pool: PoolStore, request_id: str) -> RequestRecord:
    return (await pool.records([request_id]))[request_id]


# reserve -----------------------------------------------------------------------------------------------------
async def test_a_request_is_dispatched_while_dispatched_tokens_are_under_the_window(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=800))

    outcomes = [await pool.reserve(reservation(f"r{number}")) for number in range(4)]

    assert outcomes == [
        DISPATCHED,
        DISPATCHED,
        ReserveOutcome(ReserveStatus.HELD, 0),
        ReserveOutcome(ReserveStatus.HELD, 1),
    ]
    await assert_sums_hold(pool)


async def test_running_requests_are_limited_even_when_their_prefill_is_done(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", max_running_requests=1))
    await pool.reserve(reservation("running"))
    await pool.first_token("running", "a", CHAIN)

    held = await pool.reserve(reservation("waiting"))

    assert held.status is ReserveStatus.HELD
    await assert_sums_hold(pool)


async def test_a_repeated_reservation_reports_it_as_it_stands(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    await pool.reserve(reservation("sent"))
    await pool.reserve(reservation("held"))

    again = [await pool.reserve(reservation(request_id)) for request_id in ("sent", "held")]
    await pool.first_token("sent", "a", CHAIN)
    later = [await pool.reserve(reservation(request_id)) for request_id in ("sent", "held")]

    assert again == [DISPATCHED, ReserveOutcome(ReserveStatus.HELD, 0)]
    assert later == [DISPATCHED, DISPATCHED]
    assert (await pool.loads())["a"].pending_tokens == 400
    await assert_sums_hold(pool)


@pytest.mark.parametrize("state", [InstanceState.STARTING, InstanceState.DRAINING, InstanceState.DOWN])
async def test_only_a_ready_instance_takes_new_requests(pool: PoolStore, state: InstanceState) -> None:
    await pool.put_instance(instance("a", state=state))

    refused = await pool.reserve(reservation("r"))
    unknown = await pool.reserve(reservation("r", "nobody"))

    assert (refused.status, unknown.status) == (ReserveStatus.NOT_READY, ReserveStatus.NOT_READY)
    assert (await pool.snapshot()).requests == ()


async def test_an_instance_that_only_decodes_from_now_on_takes_no_new_requests(pool: PoolStore) -> None:
    # given a replica whose view is older than the change
    await pool.put_instance(instance("a"))
    await pool.reserve(reservation("before"))
    await pool.update_instance("a", {"role": Role.DECODE})

    refused = await pool.reserve(reservation("r"))
    again = await pool.reserve(reservation("before"))

    assert (refused.status, again.status) == (ReserveStatus.NOT_READY, ReserveStatus.DISPATCHED)
    assert await pool.records(["r"]) == {}
    await assert_sums_hold(pool)


async def test_a_reservation_is_stale_when_the_load_grew_past_the_tolerance(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.reserve(reservation("before"))

    within = await pool.reserve(reservation("r1", seen_pending_tokens=0, tolerance_tokens=400))
    beyond = await pool.reserve(reservation("r2", seen_pending_tokens=0, tolerance_tokens=799))

    assert (within.status, beyond.status) == (ReserveStatus.DISPATCHED, ReserveStatus.STALE)
    assert "r2" not in await pool.records(["r2"])
    await assert_sums_hold(pool)


async def test_a_full_queue_refuses_new_requests_but_no_retries(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=1, max_queued_requests=1))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("sent"))
    await pool.reserve(reservation("held"))
    await pool.reserve(reservation("retried", "b"))

    refused = await pool.reserve(reservation("new"))
    retried = await pool.reserve(reservation("retried", "a", attempt=2))

    assert refused.status is ReserveStatus.QUEUE_FULL
    assert retried.status is ReserveStatus.HELD
    await assert_sums_hold(pool)


async def test_another_replicas_live_request_of_the_same_id_is_left_alone(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.reserve(reservation("r", replica_id="one"))

    outcome = await pool.reserve(reservation("r", replica_id="two", attempt=5))

    assert outcome.status is ReserveStatus.DUPLICATE
    assert (await record(pool, "r")).replica_id == "one"


async def test_a_retry_moves_everything_and_keeps_time_and_order(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("failed"))
    await pool.reserve(reservation("next"))
    first = await record(pool, "failed")
    clock.advance(1500)

    outcome = await pool.reserve(reservation("failed", "b", attempt=2, uncached_tokens=250))

    second, granted = await record(pool, "failed"), await record(pool, "next")
    assert outcome == DISPATCHED
    assert (second.instance_id, second.attempt, second.uncached_tokens) == ("b", 2, 250)
    assert (second.enqueued_ms, second.sequence) == (first.enqueued_ms, first.sequence)
    assert granted.state is RequestState.DISPATCHED, "the room it left was given to the next"
    await assert_sums_hold(pool)


async def test_a_retry_on_the_same_instance_does_not_count_its_own_leftovers_as_stale(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.reserve(reservation("r"))

    outcome = await pool.reserve(reservation("r", attempt=2, seen_pending_tokens=0))

    assert outcome == DISPATCHED
    assert (await pool.loads())["a"].pending_tokens == 100  # the former attempt brought the other blocks


async def test_a_refused_retry_changes_nothing(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.reserve(reservation("r"))
    before = await record(pool, "r")

    outcome = await pool.reserve(reservation("r", "nobody", attempt=2))

    assert outcome.status is ReserveStatus.NOT_READY
    assert await record(pool, "r") == before
    await assert_sums_hold(pool)


async def test_a_retry_finds_a_former_attempt_that_was_migrated(pool: PoolStore) -> None:
    for instance_id in ("a", "b", "c"):
        await pool.put_instance(instance(instance_id, dispatch_window_tokens=1))
        await pool.reserve(reservation(f"first-on-{instance_id}", instance_id))
    await pool.reserve(reservation("r", "a", alternative_id="b", alternative_uncached_tokens=100))
    lease = await pool.acquire_lease("worker", 10_000)
    assert lease is not None
    await pool.migrate("r", "a", "b", reason="benefit", fence=lease.fence)

    outcome = await pool.reserve(reservation("r", "c", attempt=2))

    assert outcome.status is ReserveStatus.HELD
    assert (await record(pool, "r")).instance_id == "c"
    assert [(await pool.loads())[name].queued_requests for name in ("a", "b", "c")] == [0, 0, 1]
    await assert_sums_hold(pool)


# observe -----------------------------------------------------------------------------------------------------
async def test_an_observation_tells_loads_in_the_order_asked_and_hits(pool: PoolStore) -> None:
    for instance_id in ("a", "b"):
        await pool.put_instance(instance(instance_id))
    await pool.reserve(reservation("r", "a", chain=chain(11, 12)))

    seen = await pool.observe(["b", "nobody", "a"], CHAIN)

    assert list(seen.loads) == ["b", "a"]
    assert [load.hit_blocks for load in seen.loads.values()] == [0, 2]
    assert (await pool.observe(["a"], CHAIN)).sequence == seen.sequence + 1


async def test_the_load_window_decays_and_the_stall_grows(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a"))
    idle = (await pool.loads())["a"]
    await pool.reserve(reservation("r"))

    clock.advance(180_000)

    load = (await pool.loads())["a"]
    assert (idle.stalled_s, load.stalled_s) == (0.0, 180.0)
    assert load.window_tokens == pytest.approx(400 / 2.718281828, rel=1e-6)


# first token -------------------------------------------------------------------------------------------------
async def test_the_first_token_releases_pending_tokens_and_grants_the_next(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    await pool.reserve(reservation("sent"))
    await pool.reserve(reservation("held"))

    released = await pool.first_token("sent", "a", CHAIN)
    again = await pool.first_token("sent", "a", CHAIN)

    load = (await pool.loads())["a"]
    assert (released, again) == (True, False)
    assert (load.pending_tokens, load.dispatched_tokens, load.running_requests) == (400, 400, 2)
    await assert_sums_hold(pool)


async def test_the_first_token_of_a_held_unknown_or_moved_request_means_nothing(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    await pool.reserve(reservation("sent"))
    await pool.reserve(reservation("held"))

    answers = [
        await pool.first_token("held", "a", CHAIN),
        await pool.first_token("unknown", "a", CHAIN),
        await pool.first_token("sent", "b", CHAIN),
    ]

    assert answers == [False, False, False]
    await assert_sums_hold(pool)


async def test_the_prefill_rate_is_learned_from_busy_time_alone(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a", prefill_tokens_per_s=1000.0, dispatch_window_tokens=10_000))
    for number in range(40):
        clock.advance(60_000)  # idle: teaches nothing
        await pool.reserve(reservation(f"r{number}", uncached_tokens=4000))
        clock.advance(2000)
        await pool.first_token(f"r{number}", "a", CHAIN)

    assert (await pool.loads())["a"].prefill_tokens_per_s == pytest.approx(2000, rel=0.05)


async def test_a_clock_that_is_set_forward_starves_no_instance(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a", prefill_tokens_per_s=1000.0, dispatch_window_tokens=10_000))
    for number in range(40):
        await pool.reserve(reservation(f"r{number}", uncached_tokens=4000))
        clock.advance(4000)
        await pool.first_token(f"r{number}", "a", CHAIN)
    await pool.reserve(reservation("r", uncached_tokens=4000))
    clock.advance(3_600_000)

    await pool.first_token("r", "a", CHAIN)

    assert (await pool.loads())["a"].prefill_tokens_per_s > 500


FEATURES = TtftFeatures(queueing_ms=0, compute_ms=500, attention_million_pairs=20, context_tokens=100_000)


async def weights(pool: PoolStore, instance_id: str = "a") -> tuple[float, ...]:
    return (await pool.loads())[instance_id].ttft_weights


async def test_an_instance_that_has_taught_nothing_expects_the_papers_ttft(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))

    assert await weights(pool) == PRIOR_WEIGHTS


async def test_the_ttft_is_learned_from_the_time_since_the_request_came(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=10_000))
    for number in range(60):
        await pool.reserve(reservation(f"r{number}", ttft_features=FEATURES))
        clock.advance(800)
        await pool.first_token(f"r{number}", "a", CHAIN)

    assert modelled_ttft_s(await weights(pool), FEATURES) == pytest.approx(0.8, rel=0.05)


async def test_a_presumed_first_token_teaches_nothing(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a"))
    before = (await pool.loads())["a"]
    await pool.reserve(reservation("r", ttft_features=FEATURES))
    clock.advance(9000)

    assert await pool.first_token("r", "a", CHAIN, seen=False)

    load = (await pool.loads())["a"]
    assert (load.ttft_weights, load.prefill_tokens_per_s) == (before.ttft_weights, before.prefill_tokens_per_s)
    assert load.pending_tokens == 0


async def test_a_retry_teaches_no_ttft_because_its_time_is_not_one_instances(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a"))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("r", "a", ttft_features=FEATURES))
    clock.advance(9000)
    await pool.reserve(reservation("r", "b", attempt=2, ttft_features=FEATURES))

    await pool.first_token("r", "b", CHAIN)

    assert await weights(pool, "b") == PRIOR_WEIGHTS


# finish ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", RequestState)
async def test_finishing_releases_whatever_is_left_exactly_once(pool: PoolStore, state: RequestState) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    if state is RequestState.HELD:
        await pool.reserve(reservation("before"))
    await pool.reserve(reservation("r"))
    if state is RequestState.PREFILLED:
        await pool.first_token("r", "a", CHAIN)
    assert (await record(pool, "r")).state is state

    finished = [await pool.finish("r"), await pool.finish("r")]

    assert finished == [True, False]
    assert await pool.records(["r"]) == {}
    await assert_sums_hold(pool)
    await pool.finish("before")
    load = (await pool.loads())["a"]
    assert (load.pending_tokens, load.dispatched_tokens, load.context_tokens, load.running_requests) == (0, 0, 0, 0)


async def test_finishing_a_former_attempt_leaves_the_newer_one_alone(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("r", "a"))
    await pool.reserve(reservation("r", "b", attempt=2))

    former = await pool.finish("r", attempt=1)
    latest = await pool.finish("r", attempt=2)

    assert (former, latest) == (False, True)


async def test_finishing_leaves_another_replicas_request_of_that_id_alone(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.reserve(reservation("r", replica_id="one"))

    duplicate = await pool.finish("r", replica_id="two", attempt=1)
    kept = await record(pool, "r")
    own = await pool.finish("r", replica_id="one", attempt=1)

    assert (duplicate, kept.replica_id, own) == (False, "one", True)
    await assert_sums_hold(pool)


async def test_finishing_a_request_that_moved_finds_it(pool: PoolStore) -> None:
    for instance_id in ("a", "b"):
        await pool.put_instance(instance(instance_id, dispatch_window_tokens=1))
        await pool.reserve(reservation(f"first-on-{instance_id}", instance_id))
    await pool.reserve(reservation("r", "a", alternative_id="b"))
    lease = await pool.acquire_lease("worker", 10_000)
    assert lease is not None
    await pool.migrate("r", "a", "b", reason="benefit", fence=lease.fence)

    assert await pool.finish("r")
    await assert_sums_hold(pool)


async def published_ratios(pool: PoolStore, *prompts: tuple[int, int]) -> list[tuple[int, float]]:
    """Epochs passed, and the bytes per token published, after each prompt of so many bytes and tokens."""
    await pool.put_instance(instance("a"))
    epoch = (await pool.membership()).epoch
    seen = []
    for prompt_bytes, prompt_tokens in prompts:
        await pool.reserve(reservation("r"))
        await pool.finish("r", facts=FinishFacts(prompt_bytes=prompt_bytes, prompt_tokens=prompt_tokens))
        membership = await pool.membership()
        seen.append((membership.epoch - epoch, membership.bytes_per_token))
    return seen


async def test_bytes_per_token_are_learned_and_published_only_when_they_moved(pool: PoolStore) -> None:
    seen = await published_ratios(pool, (84_000, 20_000), (40_000, 20_000), (60_000, 20_000))

    assert seen == [(0, 4.0), (1, pytest.approx(3.1)), (1, pytest.approx(3.1))]


async def test_the_least_bytes_per_token_are_published_once(pool: PoolStore) -> None:
    seen = await published_ratios(pool, (1, 20_000), (1, 20_000))

    assert seen == [(1, 0.001), (1, 0.001)]


async def test_prompts_of_long_ago_count_half_for_the_bytes_per_token(pool: PoolStore) -> None:
    seen = await published_ratios(pool, (16_000_003, 4_000_001), (2_000_000, 1_999_999))

    assert seen == [(0, 4.0), (1, 10_000_001 / 3_999_999)]


# KV metadata -------------------------------------------------------------------------------------------------
async def test_kv_metadata_stays_within_capacity_and_evicts_leaves_first(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", kv_capacity_tokens=500, dispatch_window_tokens=10_000))
    await pool.reserve(reservation("old", chain=chain(1, 2, 3)))
    await pool.reserve(reservation("shares-the-root", chain=chain(1, 20, 21)))

    hits = [
        (await pool.observe(["a"], request_chain)).loads["a"].hit_blocks
        for request_chain in (chain(1, 2, 3), chain(1, 20, 21))
    ]
    await pool.reserve(reservation("new", chain=chain(7, 8)))
    after = [
        (await pool.observe(["a"], request_chain)).loads["a"].hit_blocks
        for request_chain in (chain(1, 2, 3), chain(1, 20, 21), chain(7, 8))
    ]

    assert hits == [3, 3]
    assert after == [1, 3, 2]
    assert (await pool.loads())["a"].cached_blocks == 5


async def test_a_chain_longer_than_the_cache_leaves_its_head(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", kv_capacity_tokens=300))
    long = chain(*range(1, 2000))

    await pool.reserve(reservation("r", chain=long))

    load = (await pool.observe(["a"], long)).loads["a"]
    assert (load.hit_blocks, load.cached_blocks) == (3, 3)


async def test_a_thousand_blocks_are_entered_in_one_call(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    long = chain(*range(2**64 - 1201, 2**64 - 1))

    await pool.reserve(reservation("r", chain=long))

    assert (await pool.observe(["a"], long)).loads["a"].hit_blocks == 1200


async def test_after_a_migration_the_instance_that_is_given_the_work_is_believed_to_hold_it(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("first", "a", chain=chain(99)))
    await pool.reserve(reservation("r", "a", chain=CHAIN, alternative_id="b", alternative_uncached_tokens=300))
    lease = await pool.acquire_lease("worker", 10_000)
    assert lease is not None
    before = (await pool.observe(["b"], CHAIN)).loads["b"].hit_blocks

    await pool.migrate("r", "a", "b", reason="benefit", fence=lease.fence)

    assert (before, (await pool.observe(["b"], CHAIN)).loads["b"].hit_blocks) == (0, 4)


async def test_who_overtakes_the_request_that_brings_its_prefix_computes_the_prefix_itself(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    await pool.reserve(reservation("running"))
    await pool.reserve(reservation("brings", chain=chain(1, 2, 3, 4)))
    await pool.reserve(reservation("shares", chain=chain(1, 2, 3, 5), uncached_tokens=100))
    placed = await record(pool, "shares")

    await pool.finish("brings")
    await pool.first_token("running", "a", CHAIN)

    granted = await record(pool, "shares")
    assert (placed.uncached_tokens, granted.uncached_tokens) == (100, 400)
    assert granted.state is RequestState.DISPATCHED
    await assert_sums_hold(pool)


async def test_whose_prefix_was_brought_while_it_was_held_has_less_to_compute(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    await pool.reserve(reservation("running"))
    for request_id, last_block in (("brings", 4), ("shares", 5)):
        await pool.reserve(reservation(request_id, chain=chain(1, 2, 3, last_block), uncached_tokens=400))

    await pool.first_token("running", "a", CHAIN)
    await pool.first_token("brings", "a", chain(1, 2, 3, 4))

    assert (await record(pool, "shares")).uncached_tokens == 100
    assert (await pool.loads())["a"].pending_tokens == 100
    await assert_sums_hold(pool)


async def test_what_an_instance_lost_meanwhile_is_computed_again(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=1, kv_capacity_tokens=600))
    await pool.reserve(reservation("first", chain=chain(1, 2, 3)))
    await pool.reserve(reservation("held", chain=chain(1, 2, 3, 4), uncached_tokens=100))
    await pool.set_instance_state("a", InstanceState.DOWN)

    await pool.set_instance_state("a", InstanceState.READY)
    await pool.finish("first")

    assert (await record(pool, "held")).uncached_tokens == 400
    await assert_sums_hold(pool)


# grants ------------------------------------------------------------------------------------------------------
async def listening(pool: PoolStore, replica_id: str) -> asyncio.Queue[Grant]:
    """A queue that a replica's grants come to; returns once grants do arrive."""
    grants: asyncio.Queue[Grant] = asyncio.Queue()
    feed = pool.grants(replica_id)

    async def read() -> None:
        async for grant in feed:
            grants.put_nowait(grant)

    asyncio.get_running_loop().create_task(read())
    await pool.put_instance(instance("probe", dispatch_window_tokens=1))
    async with asyncio.timeout(10):
        for number in range(1000):
            await pool.reserve(reservation(f"probe{number}", "probe", replica_id=replica_id, chain=chain(1)))
            await pool.reserve(reservation(f"echo{number}", "probe", replica_id=replica_id, chain=chain(1)))
            await pool.finish(f"probe{number}")
            try:
                await asyncio.wait_for(grants.get(), 0.05)
                break
            except TimeoutError:
                pass
            finally:
                await pool.finish(f"echo{number}")
    await pool.remove_instance("probe")
    return grants


async def test_a_grant_reaches_the_replica_that_owns_the_request_and_no_other(pool: PoolStore) -> None:
    one, two = await listening(pool, "one"), await listening(pool, "two")
    await pool.put_instance(instance("a", dispatch_window_tokens=400))
    await pool.reserve(reservation("sent", replica_id="one"))
    await pool.reserve(reservation("held", replica_id="two"))

    await pool.finish("sent")

    assert await asyncio.wait_for(two.get(), 5) == Grant("held", "a", 1, 400)
    assert one.empty()


async def test_whoever_waits_for_a_grant_learns_that_listening_is_over(pool: PoolStore) -> None:
    grants = pool.grants("one")
    reading = asyncio.ensure_future(anext(grants))
    await asyncio.sleep(0)

    await grants.aclose()

    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(reading, 5)


async def test_a_store_that_answers_decides_for_all(pool: PoolStore) -> None:
    await pool.membership()

    assert not pool.degraded


async def test_grants_go_in_order_of_first_reservation_even_after_a_migration(pool: PoolStore) -> None:
    grants = await listening(pool, "one")
    for instance_id in ("a", "b"):
        await pool.put_instance(instance(instance_id, dispatch_window_tokens=400))
        await pool.reserve(reservation(f"first-on-{instance_id}", instance_id))
    await pool.reserve(reservation("older", "a", alternative_id="b", alternative_uncached_tokens=400))
    await pool.reserve(reservation("younger", "b"))
    lease = await pool.acquire_lease("worker", 10_000)
    assert lease is not None
    await pool.migrate("older", "a", "b", reason="benefit", fence=lease.fence)

    await pool.finish("first-on-b")
    await pool.finish("older")

    order = [(await asyncio.wait_for(grants.get(), 5)).request_id for _ in range(2)]
    assert order == ["older", "younger"]
