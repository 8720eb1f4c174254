"""Tiers behind the devices of instances, on every store."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, Tier
from dualmap.scheduling.estimates.learning import DisprovedTier
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights, features_of
from dualmap.scheduling.placing.placement import PlaceReply
from dualmap.scheduling.placing.policies.fleet import LOADS_ALL
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvChange, KvViewStatus, TierChange
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.records import packed_hashes
from tests.statestore.samples import (
    BLOCK_TOKENS,
    DEADLINE,
    LEAST_TTFT,
    SCHEDULING,
    HandClock,
    assert_sums_hold,
    chain,
    finish,
    first_token,
    hold,
    instance,
    place,
    record,
    sweep,
)

FAST, SLOW = LoadPrice(0.01, 0.0000125), LoadPrice(0.5, 0.01)
"""Beside 0.000125 seconds that the instances compute a token in."""
HOST = InstanceTier(Tier.HOST, 2000, FAST)
BLOCKS = tuple(range(101, 107))
PROMPT = chain(*BLOCKS, prompt_tokens=601)
OTHER = chain(*range(201, 207), prompt_tokens=601)


async def with_tiers(pool: PoolStore, *tiers: InstanceTier, takes_limits: bool = True, name: str = "a") -> None:
    """An instance whose device keeps one prompt."""
    await pool.members.put_instance(instance(name, kv_capacity_tokens=6 * BLOCK_TOKENS, dispatch_window_tokens=4000))
    assert await pool.tiers.describe(name, InstanceTiers(tiers, takes_limits))


async def report(
    pool: PoolStore,
    name: str,
    tier: Tier,
    stored: Sequence[int] = (),
    removed: Sequence[int] = (),
    most_blocks: int = 10**6,
) -> None:
    """A subscriber tells what the engine reports of a tier."""
    await pool.kv_events.renew_subscriber("worker-1", 60_000)
    claim = await pool.kv_events.claim(name, "worker-1")
    assert claim is not None
    change = KvChange(1, 1.0, tiers={tier: TierChange(stored, removed, most_blocks)})
    await pool.kv_events.apply(name, claim.fence, change)


async def served(pool: PoolStore, name: str, prompt: Chain) -> PlaceReply:
    reply = await place(pool, name, chain=prompt)
    await first_token(pool, name, "a")
    await finish(pool, name)
    return reply


async def test_what_the_device_evicted_is_found_in_a_tier_and_loaded(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    reply = await place(pool, "again", chain=PROMPT)
    load = reply.seen.loads["a"]

    assert (load.hit_blocks, load.tiers.blocks, reply.chosen.uncached_tokens) == (6, 6, 1)
    assert load.tiers.load_s == pytest.approx(FAST.load_s(600))
    assert reply.chosen.ttft_s == pytest.approx(FAST.load_s(600) + 1 / 8000)
    assert reply.chosen.loads.most_tokens is None
    assert (await record(pool, "again")).load_ms == 18
    assert (await pool.loads())["a"].loading_ms == 18


async def test_a_load_waits_for_those_that_are_booked_until_their_first_tokens(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    await place(pool, "again", chain=PROMPT)
    behind = await place(pool, "behind", chain=OTHER)
    await assert_sums_hold(pool)
    await first_token(pool, "again", "a")
    left = (await pool.loads())["a"].loading_ms
    await finish(pool, "again")
    await finish(pool, "behind")

    assert behind.seen.loads["a"].tiers.load_s == pytest.approx(0.018 + FAST.load_s(600))
    assert left == 18
    assert (await pool.loads())["a"].loading_ms == 0


async def test_where_a_load_takes_longer_than_computing_the_request_forbids_it(pool: PoolStore) -> None:
    await with_tiers(pool, InstanceTier(Tier.DISK, 2000, SLOW))
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    reply = await place(pool, "again", chain=PROMPT)

    assert reply.seen.loads["a"].tiers.blocks == 0
    assert (reply.chosen.uncached_tokens, reply.chosen.loads.most_tokens) == (601, 0)
    assert (await record(pool, "again")).load_ms == 0


async def test_an_engine_that_takes_no_limits_loads_whatever_it_costs(pool: PoolStore) -> None:
    await with_tiers(pool, InstanceTier(Tier.DISK, 2000, SLOW), takes_limits=False)
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    reply = await place(pool, "again", chain=PROMPT)

    assert (reply.seen.loads["a"].tiers.blocks, reply.chosen.loads.most_tokens) == (6, None)
    assert reply.seen.loads["a"].tiers.load_s == pytest.approx(SLOW.load_s(600))


async def test_what_is_cheap_to_load_is_loaded_and_the_rest_computed(pool: PoolStore, clock: HandClock) -> None:
    """Host memory forgets the end of the prompt, which a slow disk has."""
    await with_tiers(pool, InstanceTier(Tier.HOST, 1000, FAST), InstanceTier(Tier.DISK, 2000, SLOW))
    await served(pool, "first", PROMPT)
    clock.advance(1)
    await served(pool, "other", OTHER)
    reply = await place(pool, "again", chain=PROMPT)

    assert reply.seen.loads["a"].tiers.blocks == 4
    assert (reply.chosen.uncached_tokens, reply.chosen.loads.most_tokens) == (201, 400)
    assert reply.seen.loads["a"].tiers.load_s == pytest.approx(FAST.load_s(400))


async def test_a_prompt_that_an_instance_never_had_is_loaded_by_what_events_say(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await report(pool, "a", Tier.HOST, BLOCKS)
    stored = (await place(pool, "first", chain=PROMPT)).seen.loads["a"].tiers.blocks
    await finish(pool, "first")
    await served(pool, "other", OTHER)
    await report(pool, "a", Tier.HOST, removed=BLOCKS[3:])
    removed = (await place(pool, "again", chain=PROMPT)).seen.loads["a"].tiers.blocks

    assert (stored, removed) == (6, 3)


async def test_a_reported_tier_ends_at_its_size_and_what_is_reported_again_is_kept(
    pool: PoolStore, clock: HandClock
) -> None:
    await with_tiers(pool, HOST)
    for blocks in (BLOCKS, OTHER.hashes, BLOCKS[:2], (301, 302)):
        await report(pool, "a", Tier.HOST, blocks, most_blocks=8)
        clock.advance(1)
    again = (await pool.observe(["a"], PROMPT)).loads["a"].hit_blocks
    other = (await pool.observe(["a"], OTHER)).loads["a"].hit_blocks
    last = (await pool.observe(["a"], chain(301, 302, prompt_tokens=201))).loads["a"].hit_blocks

    assert (again, other, last) == (2, 4, 2)


async def test_the_instance_that_loads_costs_less_than_one_that_computes(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await with_tiers(pool, name="b")
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    reply = await place(pool, "again", "b", "a", chain=PROMPT, weights=LEAST_TTFT)

    assert reply.chosen.instance_id == "a"


async def test_a_held_request_is_counted_by_its_loads_when_it_is_dispatched(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    await place(pool, "busy", tokens=4000)
    held = await hold(pool, "held", chain=PROMPT)
    await first_token(pool, "busy", "a")
    await sweep(pool, scheduling=DEADLINE)
    sent = await record(pool, "held")

    assert (held.uncached_tokens, held.load_ms) == (1, 18)
    assert (sent.state.value, sent.uncached_tokens, sent.load_ms) == ("dispatched", 1, 18)
    await assert_sums_hold(pool)


async def test_observed_hits_have_what_tiers_have(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)

    assert (await pool.observe(["a"], PROMPT)).loads["a"].hit_blocks == 6


async def test_an_engine_that_ended_has_lost_its_tiers_and_one_that_emptied_its_device_has_not(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await served(pool, "first", PROMPT)
    await pool.members.forget_cache("a")
    emptied = (await pool.observe(["a"], PROMPT)).loads["a"].hit_blocks
    await pool.members.set_instance_state("a", InstanceState.DOWN)
    await pool.members.set_instance_state("a", InstanceState.READY)
    ended = (await pool.observe(["a"], PROMPT)).loads["a"].hit_blocks

    assert (emptied, ended) == (6, 0)


async def test_tiers_are_described_until_the_instance_is_removed(pool: PoolStore) -> None:
    tiers = InstanceTiers((HOST, InstanceTier(Tier.POOL, 9000, SLOW)), takes_limits=False)
    await pool.members.put_instance(instance("a"))
    await pool.tiers.describe("a", tiers)
    described = await pool.tiers.described()
    await pool.tiers.describe("a", InstanceTiers())
    none = await pool.tiers.described()
    await pool.tiers.describe("a", tiers)
    await pool.members.remove_instance("a")

    assert (described, none, await pool.tiers.described()) == ({"a": tiers}, {}, {})
    assert not await pool.tiers.describe("nobody", tiers)


async def test_an_overview_has_tiers_and_why_a_cache_is_not_known_exactly(pool: PoolStore) -> None:
    tiers = InstanceTiers((HOST, InstanceTier(Tier.POOL, 9000, SLOW, "nothing was loaded yet")))
    await with_tiers(pool)
    await with_tiers(pool, name="b")
    await pool.tiers.describe("a", tiers)
    none = (await pool.overview()).doubts
    await report(pool, "a", Tier.HOST)
    await report(pool, "b", Tier.HOST)
    for name, status, reason in (("a", KvViewStatus.EXACT, ""), ("b", KvViewStatus.ESTIMATE, "no replay")):
        claim = await pool.kv_events.claim(name, "worker-1")
        assert claim is not None
        await pool.kv_events.mark(name, claim.fence, status, reason)
    seen = await pool.overview()

    assert (none, seen.doubts, seen.tiers) == ({}, {"b": "no replay"}, {"a": tiers})
    assert (await pool.snapshot()).tiers == {"a": tiers}


async def test_an_instance_without_tiers_loads_nothing(pool: PoolStore) -> None:
    await with_tiers(pool)
    await served(pool, "first", PROMPT)
    reply = await place(pool, "other", chain=OTHER, weights=Weights(Form(load_s=1.0), Form(load_s=1.0)))

    assert (reply.chosen.ttft_s, reply.seen.loads["a"].tiers.load_s, reply.chosen.loads.most_tokens) == (0.0, 0.0, None)


COSTS = {
    "the first token": PLAIN_TTFT,
    "what delays others": Form(ahead_s=1.0, compute_s=3.0, load_s=1.0, link_s=2.0),
    "computing": Form(compute_s=1.0),
    "nothing": Form(constant=1.0),
}


@pytest.mark.parametrize("cost", COSTS)
async def test_the_load_is_the_one_of_least_cost_as_python_weighs_it(cost: str) -> None:
    """A load from none of the tiers, the nearest, or more of them is each a placement of its own."""
    rng, pool = random.Random(5), MemoryStore(SCHEDULING, now_ms=HandClock()).pool("default")
    weights, loads = Weights(COSTS[cost], PLAIN_TTFT), Counter[bool]()
    for number in range(100):
        name, blocks = f"i{number}", rng.randrange(1, 40)
        kept = [rng.randrange(blocks + 1) for _ in Tier]
        described = [
            InstanceTier(tier, 10**6, LoadPrice(rng.choice((0.0, 0.02, 0.2)), rng.choice((1e-6, 6e-5, 2e-4))))
            for tier in Tier
        ]
        tiers = InstanceTiers(tuple(described), takes_limits=rng.random() < 0.7)
        await pool.members.put_instance(instance(name))
        await pool.tiers.describe(name, tiers)
        hashes = tuple(range(1000 * number + 1, 1000 * number + blocks + 1))
        for tier, count in zip(Tier, kept, strict=True):
            await report(pool, name, tier, hashes[:count])
        prompt = chain(*hashes, prompt_tokens=blocks * BLOCK_TOKENS + 50)
        reply = await place(pool, name, name, chain=prompt, weights=weights)

        seen, cheapest = reply.seen.loads[name], least(tiers, kept, prompt, weights, reply)
        wanted = seen.hit_blocks, seen.tiers.load_s, seen.tiers.link_s
        assert wanted == (
            cheapest.hit_blocks,
            pytest.approx(cheapest.tiers.load_s),
            pytest.approx(cheapest.tiers.link_s),
        )
        dear = all(each.price.token_s * seen.prefill_tokens_per_s >= 1 for each in described)
        limited = tiers.takes_limits and (seen.hit_blocks < max(kept) or dear)
        assert reply.chosen.loads.most_tokens == (seen.hit_blocks * BLOCK_TOKENS if limited else None)
        loads[seen.tiers.blocks == max(kept)] += 1
    assert loads[False] >= (15 if cost.startswith(("the", "what")) else 0)
    assert loads[True] > 15


def least(tiers: InstanceTiers, kept: list[int], prompt: Chain, weights: Weights, reply: PlaceReply) -> InstanceLoad:
    """The load of an idle instance with the loads from tiers that cost least, or with an earlier first token."""
    idle = replace(next(iter(reply.seen.loads.values())), tiers=NO_LOAD, hit_blocks=0)
    options, taken, link_s = [idle], 0, 0.0
    for tier, count in zip(tiers.tiers, kept, strict=True):
        if count > taken:
            link_s = max(link_s, tier.price.load_s((count - taken) * BLOCK_TOKENS))
            taken = count
            options.append(replace(idle, hit_blocks=count, tiers=TierLoad(count, link_s, link_s)))
    if not tiers.takes_limits:
        options = options[-1:]

    def cost_of(option: InstanceLoad) -> tuple[float, float]:
        features = features_of(option, prompt, SCHEDULING.decode_stall_s)
        return weights.cost_of(features, 5.0), weights.ttft.of(features)

    return min(options, key=cost_of)


async def test_what_one_instance_wrote_to_a_pool_is_there_for_another_also_when_the_first_is_gone(
    pool: PoolStore,
) -> None:
    shared = InstanceTier(Tier.POOL, 2000, FAST)
    await with_tiers(pool, shared)
    await with_tiers(pool, shared, name="b")
    await place(pool, "before", "a", chain=PROMPT)
    await finish(pool, "before")
    await pool.members.set_instance_state("a", InstanceState.DOWN)
    assert await pool.members.remove_instance("a")
    reply = await place(pool, "after", "b", chain=PROMPT)

    assert reply.seen.loads["b"].tiers.blocks == 6


async def test_what_was_used_before_what_a_tier_lacks_is_forgotten(pool: PoolStore, clock: HandClock) -> None:
    await with_tiers(pool, HOST)
    for name, prompt in (("oldest", OTHER), ("lacking", PROMPT)):
        await served(pool, name, prompt)
        clock.advance(1000)
    youngest = chain(*range(301, 307), prompt_tokens=601)
    await served(pool, "youngest", youngest)
    reply = await place(pool, "again", chain=PROMPT)
    (found,) = reply.chosen.loads.in_tiers
    clock.advance(1000)
    await pool.tiers.correct(DisprovedTier("a", found.tier, found.used_ms))
    tiers = {
        name: (await place(pool, f"{name} later", chain=prompt)).seen.loads["a"].tiers.blocks
        for name, prompt in (("oldest", OTHER), ("youngest", youngest))
    }

    assert (found.tier, found.blocks, found.used_ms) == ("host", 6, reply.seen.now_ms - 1001)
    assert tiers == {"oldest": 0, "youngest": 6}


async def test_a_tier_whose_removals_are_reported_is_corrected_by_these_alone(
    pool: PoolStore, clock: HandClock
) -> None:
    await with_tiers(pool, HOST)
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    await report(pool, "a", Tier.HOST, stored=[1], removed=[2])
    clock.advance(1000)
    await pool.tiers.correct(DisprovedTier("a", "host", clock.now_ms))

    assert (await place(pool, "again", chain=PROMPT)).seen.loads["a"].tiers.blocks == 6


async def test_an_observation_has_the_device_and_each_tier_by_itself(pool: PoolStore, clock: HandClock) -> None:
    """Host memory forgets the end of the prompt, which a disk has; another instance has the prompt on its device."""
    await with_tiers(pool, InstanceTier(Tier.HOST, 1000, FAST), InstanceTier(Tier.DISK, 2000, SLOW))
    await pool.members.put_instance(instance("b"))
    await served(pool, "first", PROMPT)
    clock.advance(1)
    await served(pool, "other", OTHER)
    await place(pool, "there", "b", chain=PROMPT)

    loads = (await pool.observe(["a", "b"], PROMPT)).loads

    assert (loads["a"].hit_blocks, loads["a"].tiers.blocks) == (6, 6)
    assert [each[:2] for each in loads["a"].tiers.in_tiers] == [("host", 4), ("disk", 2)]
    assert loads["a"].tiers.link_s == pytest.approx(SLOW.load_s(200))
    assert (loads["b"].hit_blocks, loads["b"].tiers) == (6, NO_LOAD)


async def test_a_policy_without_prices_loads_whatever_there_is(pool: PoolStore) -> None:
    await with_tiers(pool, InstanceTier(Tier.DISK, 2000, SLOW))
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    reply = await place(pool, "again", chain=PROMPT, weights=LOADS_ALL)

    assert (reply.seen.loads["a"].tiers.blocks, reply.chosen.uncached_tokens) == (6, 1)


async def test_nothing_is_loaded_from_tiers_of_a_hybrid_model(pool: PoolStore) -> None:
    """A part of its groups is no hit, and an engine with several cannot compute again what a load has lost."""
    await with_tiers(pool, HOST, InstanceTier(Tier.DISK, 2000, SLOW))
    await served(pool, "first", PROMPT)
    await served(pool, "other", OTHER)
    await pool.kv_events.renew_subscriber("worker-1", 60_000)
    claim = await pool.kv_events.claim("a", "worker-1")
    assert claim is not None
    await pool.kv_events.apply("a", claim.fence, KvChange(1, 1.0, hit_step_tokens=100))

    seen = (await pool.observe(["a"], PROMPT)).loads["a"]
    reply = await place(pool, "again", chain=PROMPT)

    assert (seen.hit_blocks, seen.tiers) == (0, NO_LOAD)
    assert (reply.chosen.uncached_tokens, reply.chosen.loads.blocks, reply.chosen.loads.source) == (601, 0, None)
    assert (await pool.loads())["a"].loading_ms == 0


async def test_a_tier_that_lost_the_beginning_of_a_prompt_has_nothing_of_it(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await report(pool, "a", Tier.HOST, BLOCKS[1:])

    assert (await place(pool, "r", chain=PROMPT)).chosen.loads.blocks == 0


async def test_a_held_request_is_dispatched_by_what_each_tier_has_behind_the_one_before(pool: PoolStore) -> None:
    tiers = [InstanceTier(tier, 2000, FAST) for tier in (Tier.HOST, Tier.DISK)]
    await with_tiers(pool, *tiers)
    await report(pool, "a", Tier.HOST, BLOCKS[:4])
    await place(pool, "busy", "a", tokens=4000)
    held = await hold(pool, "held", "a", chain=PROMPT)
    await report(pool, "a", Tier.DISK, BLOCKS[4:])
    await finish(pool, "busy")
    await sweep(pool, scheduling=DEADLINE)

    assert (held.uncached_tokens, (await record(pool, "held")).uncached_tokens) == (201, 1)


async def test_a_held_request_enters_tiers_when_it_is_dispatched(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await place(pool, "busy", "a", tokens=4000)
    await hold(pool, "held", "a", chain=PROMPT)
    words = ("ZMSCORE", PoolKeys("dualmap", "default").kv_tier("host:a"), *packed_hashes(PROMPT.hashes))
    before = await pool._calls.command(*words)
    await finish(pool, "busy")
    await sweep(pool, scheduling=DEADLINE)
    after = await pool._calls.command(*words)

    assert (before, None in after) == ([None] * 6, False)
    request = PoolKeys("dualmap", "default").request("held")
    assert await pool._calls.command("HGET", request, "chain") is None, "it is needed no more"


async def test_loads_behind_what_is_only_reserved_are_not_counted(pool: PoolStore) -> None:
    """The blocks before them may never be computed, and then they are no hit."""
    await with_tiers(pool, HOST)
    await report(pool, "a", Tier.HOST, BLOCKS[3:])
    await place(pool, "busy", "a", tokens=4000)
    await hold(pool, "reserves", "a", chain=chain(*PROMPT.hashes[:3], prompt_tokens=301))
    held = await hold(pool, "held", "a", chain=PROMPT)

    assert held.uncached_tokens == 601


async def test_the_last_token_of_a_prompt_is_never_loaded(pool: PoolStore) -> None:
    await with_tiers(pool, HOST)
    await report(pool, "a", Tier.HOST, BLOCKS)
    reply = await place(pool, "r", chain=chain(*BLOCKS, prompt_tokens=600))

    assert (reply.chosen.loads.blocks, reply.chosen.uncached_tokens) == (5, 100)
