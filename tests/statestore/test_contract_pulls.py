"""Pulls from other instances' caches, on every store: when they are chosen, and what they book."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.request.metering import KEPT
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState
from dualmap.scheduling.state.tier_load import NO_LOAD, Source
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvChange, TierChange
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import (
    LEAST_TTFT,
    HandClock,
    assert_sums_hold,
    chain,
    finish,
    first_token,
    instance,
    lead,
    place,
    record,
    sweep,
)

PRICE = LoadPrice(0.01, 0.0000125)
"""Beside 0.000125 seconds that the instances compute a token in."""
PROMPT = chain(*range(101, 107), prompt_tokens=601)
OWN_S = PRICE.load_s(600)


async def member(pool: PoolStore, name: str, *tiers: InstanceTier, layout: str = "x", **figures: Any) -> None:
    await pool.members.put_instance(instance(name, **figures))
    await pool.tiers.describe(name, InstanceTiers(tiers, pulls=PullEnd(f"host-{name}", 5710, layout, PRICE)))


async def has_prompt(pool: PoolStore, name: str) -> None:
    """The instance has computed the prompt."""
    await place(pool, f"before {name}", name, chain=PROMPT)
    await first_token(pool, f"before {name}", name)
    await finish(pool, f"before {name}")


async def confirmed(pool: PoolStore, name: str, blocks: Sequence[int] = PROMPT.hashes) -> None:
    """The engine has reported these blocks."""
    claim = await pool.kv_events.claim(name, "worker")
    assert claim is not None
    await pool.kv_events.apply(name, claim.fence, KvChange(0, 1.0, blocks))


async def busy(pool: PoolStore, name: str, held_tokens: int = 8000) -> None:
    """The instance computes 400 tokens, for a twentieth of a second, and has more in its queue."""
    await place(pool, f"computed {name}", name, tokens=400)
    await place(pool, f"held {name}", name, tokens=held_tokens)


async def pair(pool: PoolStore, request_id: str, *names: str, **changes: Any) -> PlaceReply:
    return await place(pool, request_id, *(names or ("a", "b")), chain=PROMPT, weights=LEAST_TTFT, **changes)


async def pullable(pool: PoolStore) -> None:
    """Two instances, of which the first has the prompt and a second of work."""
    for name in ("a", "b"):
        await member(pool, name, dispatch_window_tokens=400)
    await has_prompt(pool, "a")
    await busy(pool, "a")


async def booked_s(pool: PoolStore, name: str, now_ms: int) -> float:
    """The time for which the link of a source is booked."""
    until = await pool._calls.command("HGET", PoolKeys("dualmap", "default").instance_links, name)
    return 0.0 if until is None else (int(until) - now_ms) / 1000


async def test_a_prompt_is_pulled_where_its_instance_is_busy_and_both_ends_are_booked(pool: PoolStore) -> None:
    await pullable(pool)
    reply = await pair(pool, "r")

    assert (reply.status, reply.chosen.instance_id) == (PlaceStatus.DISPATCHED, "b")
    assert reply.chosen.loads.source == Source("a", "host-a", 5710, 600, pytest.approx(OWN_S))
    assert (reply.chosen.uncached_tokens, reply.seen.hits["b"]) == (1, 6)
    # it waits for what the source computes, as that may be its prompt
    assert reply.seen.loads["b"].tiers.load_s == pytest.approx(0.05 + OWN_S)
    assert reply.chosen.ttft_s == pytest.approx(0.05 + OWN_S + 1 / 8000)
    assert (await pool.loads())["b"].loading_ms == 18
    assert await booked_s(pool, "a", reply.seen.now_ms) == pytest.approx(0.018)
    await assert_sums_hold(pool)


async def test_what_the_engine_has_reported_can_be_pulled_whatever_the_source_computes(pool: PoolStore) -> None:
    await pullable(pool)
    await confirmed(pool, "a")
    reply = await pair(pool, "r")

    assert reply.seen.loads["b"].tiers.load_s == pytest.approx(OWN_S)


async def test_pulls_wait_for_those_before_them_on_either_link(pool: PoolStore) -> None:
    await pullable(pool)
    await member(pool, "c")
    await confirmed(pool, "a")
    other = chain(*range(301, 307), prompt_tokens=601)
    await place(pool, "elsewhere", "c", chain=other)
    await confirmed(pool, "c", other.hashes)
    await pair(pool, "first", "b")
    # when the source of the first serves another one, and its target pulls from another one
    from_source = await pair(pool, "second", "a", "c")
    to_target = await place(pool, "third", "b", chain=other, weights=LEAST_TTFT)

    assert from_source.chosen.loads.source == Source("a", "host-a", 5710, 600, pytest.approx(OWN_S))
    assert from_source.seen.loads["c"].tiers.load_s == pytest.approx(0.018 + OWN_S)
    assert to_target.chosen.loads.source is not None
    assert to_target.seen.loads["b"].tiers.load_s == pytest.approx(0.018 + OWN_S, abs=0.001)


async def test_bookings_end_with_the_first_token_and_with_their_time(pool: PoolStore) -> None:
    await pullable(pool)
    reply = await pair(pool, "r")
    await first_token(pool, "r", "b")

    assert (await pool.loads())["b"].loading_ms == 0
    assert (await record(pool, "r")).load_ms == 18
    # what is booked on the source is a time that passes
    assert await booked_s(pool, "a", reply.seen.now_ms + 18) == pytest.approx(0.0)
    await assert_sums_hold(pool)


@pytest.mark.parametrize("how", ["ended", "reaped"])
async def test_a_request_that_ends_in_its_pull_leaves_nothing_booked_on_its_target(
    pool: PoolStore, clock: HandClock, how: str
) -> None:
    await pool.heartbeat("one", 1000, {})
    await pullable(pool)
    await pair(pool, "r")
    if how == "ended":
        await finish(pool, "r")
    else:
        fence = await lead(pool)
        clock.advance(1000)
        assert await pool.upkeep.reap("one", fence=fence) > 0

    assert (await pool.loads())["b"].loading_ms == 0
    await assert_sums_hold(pool)


async def test_nothing_is_pulled_where_waiting_costs_less(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await member(pool, name)
    await has_prompt(pool, "a")
    reply = await pair(pool, "r")

    assert (reply.chosen.instance_id, reply.chosen.loads.source) == ("a", None)
    assert await booked_s(pool, "a", reply.seen.now_ms) == 0.0


@pytest.mark.parametrize("why", ["layout", "no end", "down", "forbidden", "hybrid", "too slow"])
async def test_nothing_is_pulled_where_it_cannot_be(pool: PoolStore, why: str) -> None:
    await pullable(pool)
    if why == "layout":
        await member(pool, "b", layout="y")
    elif why == "no end":
        await pool.tiers.describe("a", InstanceTiers())
    elif why == "down":
        await pool.members.set_instance_state("a", InstanceState.DOWN)
    elif why == "hybrid":
        claim = await pool.kv_events.claim("b", "worker")
        assert claim is not None
        await pool.kv_events.apply("b", claim.fence, KvChange(0, 1.0, hit_step_tokens=100))
    elif why == "too slow":
        end = PullEnd("host-b", 5710, "x", LoadPrice(0.01, 0.0002))
        await pool.tiers.describe("b", InstanceTiers(pulls=end))
    reply = await pair(pool, "r", pulls=why != "forbidden")

    assert (reply.chosen.instance_id, reply.chosen.loads.source) == ("b", None)
    assert (reply.chosen.uncached_tokens, (await pool.loads())["b"].loading_ms) == (601, 0)


async def test_a_part_in_pulls_is_described_and_so_is_why_there_is_none(pool: PoolStore) -> None:
    end = PullEnd("host-a", 5710, "x", PRICE, "nothing was loaded yet", fails_requests=True)
    part, none = InstanceTiers(pulls=end), InstanceTiers(no_pulls="its place is unknown")
    for name, tiers in (("a", part), ("b", none)):
        await pool.members.put_instance(instance(name))
        await pool.tiers.describe(name, tiers)

    assert await pool.tiers.described() == {"a": part, "b": none}
    await has_prompt(pool, "a")
    assert (await pair(pool, "r")).chosen.loads.source is None


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.STANDBY])
async def test_an_instance_that_leaves_is_pulled_from(pool: PoolStore, state: InstanceState) -> None:
    for name in ("a", "b"):
        await member(pool, name)
    await has_prompt(pool, "a")
    await pool.members.set_instance_state("a", state)
    reply = await pair(pool, "r", "b")

    assert reply.chosen.loads.source is not None
    assert reply.chosen.loads.source.instance_id == "a"


async def test_what_is_only_reserved_on_the_source_is_not_pulled(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await member(pool, name, dispatch_window_tokens=400)
    await busy(pool, "a")
    await place(pool, "reserves", "a", chain=PROMPT)
    assert (await record(pool, "reserves")).state is RequestState.HELD
    reply = await pair(pool, "r", "b")

    assert reply.chosen.loads.source is None


async def test_host_memory_of_the_source_counts_and_the_tiers_of_the_target_come_first(pool: PoolStore) -> None:
    host = InstanceTier(Tier.HOST, 2000, LoadPrice(0.0, 0.000001))
    await member(pool, "a", host, kv_capacity_tokens=600)
    await member(pool, "b", host, kv_capacity_tokens=600)
    await has_prompt(pool, "a")
    await place(pool, "start", "b", chain=chain(*PROMPT.hashes[:2], prompt_tokens=201))
    for name in ("a", "b"):
        await place(pool, f"evicts {name}", name, tokens=600)
        await first_token(pool, f"evicts {name}", name)
    reply = await pair(pool, "r", "b")

    assert reply.chosen.loads.source is not None
    assert reply.chosen.loads.source.own_s == pytest.approx(PRICE.load_s(400)), "two blocks are in its own host memory"
    assert (reply.chosen.uncached_tokens, reply.chosen.loads.most_tokens) == (1, None)


async def test_a_held_request_keeps_what_it_is_to_pull_until_it_is_granted(pool: PoolStore) -> None:
    await pullable(pool)
    await place(pool, "before", "b", tokens=800)
    reply = await pair(pool, "r", "b")
    held = await record(pool, "r")
    await first_token(pool, "before", "b")
    await sweep(pool, "b")
    sent = await record(pool, "r")

    assert (reply.status, reply.chosen.loads.source is not None) == (PlaceStatus.HELD, True)
    assert (held.uncached_tokens, held.load_ms) == (1, 18)
    assert (sent.state, sent.uncached_tokens, sent.load_ms) == (RequestState.DISPATCHED, 1, 18)
    await assert_sums_hold(pool)


async def test_a_source_that_is_removed_leaves_no_booking(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await member(pool, name)
    await has_prompt(pool, "a")
    await pool.members.set_instance_state("a", InstanceState.STANDBY)
    reply = await pair(pool, "r", "b")
    assert await booked_s(pool, "a", reply.seen.now_ms) > 0
    assert await pool.members.remove_instance("a")

    assert await booked_s(pool, "a", reply.seen.now_ms) == 0.0


async def test_what_is_pulled_is_listed_with_the_first_token_and_not_before(pool: PoolStore) -> None:
    await pullable(pool)
    await pair(pool, "r")
    meanwhile = await pair(pool, "next", "b")
    await first_token(pool, "r", "b")
    later = await pair(pool, "last", "b")

    # an engine computes what another request of it is still pulling: so the next one pulls too
    assert (meanwhile.seen.hits["b"], meanwhile.chosen.loads.source is not None) == (6, True)
    assert (later.seen.hits["b"], later.chosen.loads) == (6, NO_LOAD)
    assert (await pool.loads())["b"].cached_blocks == 6
    await assert_sums_hold(pool)


async def test_a_whole_answer_shows_what_was_pulled_for_it(pool: PoolStore) -> None:
    await pullable(pool)
    await pair(pool, "r")
    await finish(pool, "r", seen=True)

    assert (await pair(pool, "last", "b")).chosen.loads == NO_LOAD


async def test_a_request_that_ends_in_its_pull_leaves_nothing_listed(pool: PoolStore) -> None:
    await pullable(pool)
    await pair(pool, "r")
    await finish(pool, "r")

    assert (await pool.loads())["b"].cached_blocks == 0


async def test_the_source_stays_the_holder_of_a_prompt_until_its_copy_is_there(pool: PoolStore) -> None:
    await pullable(pool)
    await member(pool, "c")
    await confirmed(pool, "a")
    await pair(pool, "r", "b")
    elsewhere = await pair(pool, "next", "c")
    await first_token(pool, "r", "b")
    await pool.members.set_instance_state("a", InstanceState.DOWN)
    after = await pair(pool, "last", "c", excluded=frozenset({"a"}))

    assert elsewhere.chosen.loads.source is not None
    assert elsewhere.chosen.loads.source.instance_id == "a"
    assert after.chosen.loads.source is not None
    assert after.chosen.loads.source.instance_id == "b"


async def test_a_held_request_that_was_to_pull_and_is_moved_is_listed_where_it_is_sent(pool: PoolStore) -> None:
    await pullable(pool)
    await member(pool, "c")
    await place(pool, "before", "b", tokens=800)
    await pair(pool, "r", "b")
    held = await record(pool, "r")
    await pool.queues.migrate(held, "c", reason="rebalanced", fence=await lead(pool))
    await sweep(pool, "c")

    assert (await record(pool, "r")).state is RequestState.DISPATCHED
    assert (await pool.loads())["c"].cached_blocks == 6
    assert (await pool.loads())["b"].loading_ms == 0
    await assert_sums_hold(pool)


async def test_a_policy_may_name_the_source_in_place_of_the_last_holder(pool: PoolStore) -> None:
    for name in ("a", "b", "c"):
        await member(pool, name)
    await has_prompt(pool, "a")
    await has_prompt(pool, "c")

    sources = [(await pair(pool, f"r{source}", "b", source=source)).chosen.loads.source for source in ("a", "c")]

    assert [source and source.instance_id for source in sources] == ["a", "c"]


HOST = InstanceTier(Tier.HOST, 2000, PRICE)


async def in_tier(pool: PoolStore, name: str, tier: Tier, blocks: Sequence[int], removed: Sequence[int] = ()) -> None:
    """A tier of the instance is reported to have these blocks."""
    claim = await pool.kv_events.claim(name, "worker")
    assert claim is not None
    await pool.kv_events.apply(name, claim.fence, KvChange(0, 1.0, tiers={tier: TierChange(blocks, removed, 1000)}))


async def full(pool: PoolStore, name: str, **figures: Any) -> None:
    """An instance whose memory is full of another prompt."""
    await member(pool, name, kv_capacity_tokens=600, **figures)
    await has_other(pool, name)


async def has_other(pool: PoolStore, name: str) -> None:
    await place(pool, f"fills {name}", name, tokens=600)
    await first_token(pool, f"fills {name}", name)
    await finish(pool, f"fills {name}")


async def test_pulls_from_one_source_are_booked_one_behind_the_other(pool: PoolStore) -> None:
    await pullable(pool)
    await member(pool, "c")
    await confirmed(pool, "a")
    for target in ("b", "c"):
        reply = await pair(pool, f"to {target}", target)

    assert await booked_s(pool, "a", reply.seen.now_ms) == pytest.approx(2 * 0.018)


@pytest.mark.parametrize("how", ["ended", "failed", "reaped"])
async def test_what_is_left_of_a_booking_is_given_back_by_a_request_that_ends_before(
    pool: PoolStore, clock: HandClock, how: str
) -> None:
    """A client that leaves again and again keeps no link from others."""
    await pool.heartbeat("one", 8, {})
    await pullable(pool)
    await member(pool, "c")
    await confirmed(pool, "a")
    await pair(pool, "first", "b", account="acme ci - m" if how == "failed" else "")
    await pair(pool, "second", "c", replica_id="two")
    clock.advance(8)
    if how == "reaped":
        assert await pool.upkeep.reap("one", fence=await lead(pool)) > 0
    else:
        await finish(pool, "first", **({"used": KEPT} if how == "failed" else {}))
    left_s = await booked_s(pool, "a", clock.now_ms)
    await finish(pool, "second")

    assert left_s == pytest.approx(2 * 0.018 - 0.018)
    assert await booked_s(pool, "a", clock.now_ms) == 0.0


async def test_a_request_that_has_pulled_gives_nothing_back(pool: PoolStore) -> None:
    await pullable(pool)
    reply = await pair(pool, "r", "b")
    await first_token(pool, "r", "b")
    await finish(pool, "r")

    assert await booked_s(pool, "a", reply.seen.now_ms) == pytest.approx(0.018)


async def test_of_two_sources_the_one_whose_link_is_free_serves(pool: PoolStore) -> None:
    for name in ("a", "b", "c", "d"):
        await member(pool, name)
    for name in ("a", "c"):
        await confirmed(pool, name)
    sources = []
    for request_id, target in (("first", "b"), ("second", "d")):
        # both are weighed and take no requests
        for name in ("a", "c"):
            await pool.members.set_instance_state(name, InstanceState.DRAINING)
        source = (await pair(pool, request_id, "a", "c", target)).chosen.loads.source
        assert source is not None
        sources.append(source.instance_id)

    assert sources == ["a", "c"]


@pytest.mark.parametrize("what", ["ready", "leaves", "hot"])
async def test_a_copy_costs_what_it_takes_the_place_of_unless_it_moves_or_is_hot(pool: PoolStore, what: str) -> None:
    """Waiting for the instance that has the prompt takes 0.05 s, a pull 0.02 s; what its copy evicts, 0.075 s."""
    await member(pool, "a")
    await member(pool, "c", dispatch_window_tokens=400)
    await full(pool, "b")
    for name in ("a", "c"):
        await confirmed(pool, name)
    await place(pool, "computed", "c", tokens=400)
    await pool.members.set_instance_state("a", InstanceState.DRAINING if what == "leaves" else InstanceState.DOWN)
    reply = await pair(pool, "r", "a", "c", "b", hot_tokens=600 if what == "hot" else 0)

    assert reply.chosen.instance_id == ("c" if what == "ready" else "b")
    assert (reply.chosen.loads.source is None) == (what == "ready")


async def test_what_the_source_still_loads_is_waited_for(pool: PoolStore) -> None:
    await member(pool, "a", HOST)
    await member(pool, "b")
    other = chain(*range(301, 307), prompt_tokens=601)
    await in_tier(pool, "a", Tier.HOST, other.hashes)
    await has_prompt(pool, "a")
    await place(pool, "loads", "a", chain=other)
    reply = await pair(pool, "r", "b")

    assert (await pool.loads())["a"].loading_ms == 18
    assert reply.seen.loads["b"].tiers.load_s == pytest.approx(0.018 + 1 / 8000 + OWN_S)


async def test_what_was_pulled_enters_the_tiers_of_its_target(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await member(pool, name, HOST, kv_capacity_tokens=600)
    await has_prompt(pool, "a")
    await pair(pool, "r", "b")
    await first_token(pool, "r", "b")
    await finish(pool, "r")
    await has_other(pool, "b")
    again = await pair(pool, "again", "b", pulls=False)

    assert again.chosen.loads.blocks == 6


async def test_the_last_token_of_a_prompt_is_never_pulled(pool: PoolStore) -> None:
    await pullable(pool)
    await confirmed(pool, "a")
    reply = await place(pool, "r", "a", "b", chain=chain(*PROMPT.hashes, prompt_tokens=600), weights=LEAST_TTFT)

    assert reply.chosen.loads.source is not None
    assert (reply.chosen.loads.source.tokens, reply.chosen.uncached_tokens) == (500, 100)


async def test_a_pull_and_a_slower_load_from_a_tier_go_on_side_by_side(pool: PoolStore) -> None:
    slow = LoadPrice(0.05, 1e-9)
    await member(pool, "a")
    await member(pool, "b", InstanceTier(Tier.HOST, 2000, slow))
    description = (await pool.tiers.described())["b"]
    await pool.tiers.describe("b", InstanceTiers(description.tiers, takes_limits=False, pulls=description.pulls))
    await in_tier(pool, "b", Tier.HOST, PROMPT.hashes[:2])
    await confirmed(pool, "a")
    await pool.members.set_instance_state("a", InstanceState.DRAINING)
    reply = await pair(pool, "r", "a", "b")
    load = reply.seen.loads["b"].tiers

    assert load.source == Source("a", "host-a", 5710, 400, pytest.approx(PRICE.load_s(400)))
    assert (load.load_s, load.link_s) == (pytest.approx(slow.load_s(200)), pytest.approx(slow.load_s(200)))
    assert (await record(pool, "r")).load_ms == 51


async def test_where_a_request_may_be_moved_to_it_is_to_compute_what_it_would_have_pulled(pool: PoolStore) -> None:
    await pullable(pool)
    await member(pool, "c", dispatch_window_tokens=400)
    reply = await pair(pool, "r", "b", "c")
    placed = await record(pool, "r")

    assert reply.seen.loads["c"].tiers.source is not None
    assert (placed.alternative_id, placed.alternative_uncached_tokens) == ("c", 601)


async def test_the_last_holder_of_a_prompt_serves_requests_of_its_own_revision_alone(pool: PoolStore) -> None:
    for name, revision in (("a", "1"), ("b", "2"), ("c", "1")):
        await member(pool, name, revision=revision)
    await has_prompt(pool, "a")
    replies = [await pair(pool, f"r{name}", name, revision=revision) for name, revision in (("c", "1"), ("b", "2"))]
    sources = [reply.chosen.loads.source for reply in replies]

    assert [source and source.instance_id for source in sources] == ["a", None]


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
async def test_split_requests_pull_nothing(pool: PoolStore, leg: Leg) -> None:
    await pullable(pool)

    assert (await pair(pool, "r", "b", leg=leg)).chosen.loads.source is None


async def test_an_instance_pulls_nothing_from_itself(pool: PoolStore) -> None:
    """Its host memory has what is slower to load than to compute."""
    await member(pool, "a", InstanceTier(Tier.HOST, 2000, LoadPrice(0.5, 0.01)))
    await in_tier(pool, "a", Tier.HOST, PROMPT.hashes)
    reply = await pair(pool, "r", "a")

    assert (reply.chosen.loads.source, reply.chosen.uncached_tokens) == (None, 601)


async def test_a_source_serves_from_its_host_memory_and_not_from_its_disk(pool: PoolStore) -> None:
    await member(pool, "a", InstanceTier(Tier.DISK, 2000, LoadPrice(0.01, 0.0000125)))
    await member(pool, "b")
    await in_tier(pool, "a", Tier.DISK, PROMPT.hashes)
    await pool.members.set_instance_state("a", InstanceState.DRAINING)

    assert (await pair(pool, "r", "a", "b")).chosen.loads.source is None


@pytest.mark.parametrize("how", ["hybrid", "drops the last block"])
async def test_what_was_pulled_is_listed_on_an_instance_that_meanwhile_shows_how_it_counts(
    pool: PoolStore, how: str
) -> None:
    await pullable(pool)
    await pair(pool, "r")
    if how == "hybrid":
        claim = await pool.kv_events.claim("b", "worker")
        assert claim is not None
        await pool.kv_events.apply("b", claim.fence, KvChange(0, 1.0, hit_step_tokens=200))
    else:
        await pool.members.update_instance("b", {"dropped_blocks": 1})
    await first_token(pool, "r", "b")
    await finish(pool, "r")
    after = await pair(pool, "after", "b")

    assert ((await pool.loads())["b"].loading_ms, (await pool.loads())["b"].cached_blocks) == (0, 6)
    assert after.seen.hits["b"] == (6 if how == "hybrid" else 5)
    await assert_sums_hold(pool)
