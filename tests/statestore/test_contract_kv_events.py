"""KV events: claims, confirmed and booked blocks, on every store."""

from __future__ import annotations

import pytest

from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import BOOKING_MS, KvChange, KvEventRecord, KvViewStatus
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import CHAIN, HandClock, chain, finish, hold, instance, lead, place, record, sweep

LEASE_MS = 2000
KEYS = PoolKeys("dualmap", "default")


async def claimed(pool: PoolStore, status: KvViewStatus = KvViewStatus.EXACT) -> int:
    """An instance whose events worker-1 reads; the fence."""
    await pool.members.put_instance(instance("a"))
    await pool.kv_events.renew_subscriber("worker-1", LEASE_MS)
    record = await pool.kv_events.claim("a", "worker-1")
    assert record is not None
    await pool.kv_events.mark("a", record.fence, status)
    return record.fence


async def record_of(pool: PoolStore) -> KvEventRecord:
    return (await pool.kv_events.records())["a"]


async def hit_of(pool: PoolStore) -> int:
    return (await pool.observe(["a"], CHAIN)).loads["a"].hit_blocks


async def test_an_instance_that_nobody_reads_is_an_estimate(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))

    assert await pool.kv_events.records() == {"a": KvEventRecord("a")}


async def test_a_snapshot_has_what_is_followed_of_each_instance(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.members.put_instance(instance("b"))
    await pool.kv_events.mark("a", fence, KvViewStatus.ESTIMATE, "an unknown kind")

    views = (await pool.snapshot()).kv_views

    assert {name: (view.status, view.reason) for name, view in views.items()} == {
        "a": (KvViewStatus.ESTIMATE, "an unknown kind"),
        "b": (KvViewStatus.ESTIMATE, ""),
    }


async def test_one_living_subscriber_has_an_instance(pool: PoolStore, clock: HandClock) -> None:
    fence = await claimed(pool)
    await pool.kv_events.renew_subscriber("worker-2", 60_000)

    refused = await pool.kv_events.claim("a", "worker-2")
    clock.advance(LEASE_MS)
    taken = await pool.kv_events.claim("a", "worker-2")

    assert refused is None
    assert taken is not None
    assert (taken.owner, taken.fence > fence, taken.status) == ("worker-2", True, KvViewStatus.EXACT)
    with pytest.raises(LeaseLostError):
        await pool.kv_events.apply("a", fence, KvChange(0, 1.0, [11]))


async def test_an_instance_that_was_given_back_is_free(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.renew_subscriber("worker-2", LEASE_MS)
    await pool.kv_events.release("a", fence)
    await pool.kv_events.release("a", fence - 1)
    taken = await pool.kv_events.claim("a", "worker-2")

    assert taken is not None
    assert taken.fence > fence, "though no time has passed"


async def test_an_unknown_instance_is_nobodys(pool: PoolStore) -> None:
    await pool.kv_events.renew_subscriber("worker-1", LEASE_MS)

    assert await pool.kv_events.claim("nobody", "worker-1") is None
    await pool.kv_events.release("nobody", 1)


async def test_living_subscribers_are_told(pool: PoolStore, clock: HandClock) -> None:
    await pool.kv_events.renew_subscriber("worker-2", 60_000)
    both = await pool.kv_events.renew_subscriber("worker-1", LEASE_MS)
    clock.advance(LEASE_MS)
    later = await pool.kv_events.renew_subscriber("worker-3", LEASE_MS)
    left = await pool.kv_events.renew_subscriber("worker-2", 0)

    assert (both, later, left) == (["worker-1", "worker-2"], ["worker-2", "worker-3"], ["worker-3"])


async def test_confirmed_blocks_are_hits_and_removed_ones_are_not(pool: PoolStore) -> None:
    fence = await claimed(pool)

    booked = await pool.kv_events.apply("a", fence, KvChange(0, 1.0, [11, 12, 13], (), {b"x": b"11", b"y": b"12"}))
    before = await hit_of(pool)
    await pool.kv_events.apply("a", fence, KvChange(1, 2.5, [14], [13], {b"x": b"", b"z": b"14"}))

    assert (booked, before, await hit_of(pool)) == (0, 3, 2)
    assert (await pool.loads())["a"].cached_blocks == 3
    assert await pool.kv_events.names("a") == {b"y": b"12", b"z": b"14"}
    record = await record_of(pool)
    assert (record.sequence, record.published_s) == (1, 2.5)


async def test_all_names_take_the_place_of_those_before(pool: PoolStore) -> None:
    fence = await claimed(pool)
    for sequence in range(500):
        name = b"%d" % (sequence % 7)
        await pool.kv_events.apply("a", fence, KvChange(sequence, 1.0, (), (), {name: b"%d" % sequence}))
    many = await pool.kv_events.names("a")

    await pool.kv_events.apply("a", fence, KvChange(500, 1.0, (), (), {b"x": b"1", b"y": b"2"}, all_names=True))
    await pool.kv_events.apply("a", fence, KvChange(501, 1.0, (), (), {b"x": b""}))

    assert many == {b"%d" % (sequence % 7): b"%d" % sequence for sequence in range(493, 500)}
    assert await pool.kv_events.names("a") == {b"y": b"2"}
    await pool.kv_events.apply("a", fence, KvChange(502, 1.0, all_names=True))
    assert await pool.kv_events.names("a") == {}


async def test_a_request_is_counted_by_what_is_booked_and_what_is_confirmed(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes[:2]))

    first = await place(pool, "first", "a", chain=CHAIN)
    second = await place(pool, "second", "a", chain=chain(*CHAIN.hashes, 15, 16))

    assert (first.chosen.uncached_tokens, second.chosen.uncached_tokens) == (200, 200)


async def test_a_placement_books_what_follows_the_confirmed_head(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes[:3]))
    longer = chain(*CHAIN.hashes[:3], 15, 16)
    await place(pool, "first", "a", chain=longer)

    found = await pool.observe(["a"], longer)
    assert (found.loads["a"].hit_blocks, found.loads["a"].cached_blocks) == (5, 5)

    await pool.kv_events.apply("a", fence, KvChange(1, 1.0, (), CHAIN.hashes[2:3]))
    assert (await pool.loads())["a"].cached_blocks == 4
    assert await hit_of(pool) == 2


async def test_what_was_booked_behind_an_evicted_end_is_no_hit(pool: PoolStore) -> None:
    fence = await claimed(pool)
    turn = chain(*CHAIN.hashes, *range(15, 30))
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes))
    await place(pool, "busy", "a", tokens=4000)
    held = await hold(pool, "held", slo_ms=60_000, chain=turn)

    await pool.kv_events.apply("a", fence, KvChange(1, 1.0, (), CHAIN.hashes[1:]))
    hit_blocks = (await pool.observe(["a"], turn)).loads["a"].hit_blocks
    later = await hold(pool, "later", slo_ms=60_000, chain=turn)
    await finish(pool, "busy")
    await sweep(pool)
    granted = await record(pool, "held")

    assert (held.state, held.uncached_tokens) == (RequestState.HELD, 1500)
    assert (hit_blocks, later.uncached_tokens) == (1, 1800)
    assert (granted.state, granted.uncached_tokens) == (RequestState.DISPATCHED, 1800)


async def test_the_engine_confirms_what_was_booked(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await place(pool, "first", "a", chain=CHAIN)

    assert await pool.kv_events.apply("a", fence, KvChange(0, 1.0, [*CHAIN.hashes, 99])) == 4
    assert (await pool.loads())["a"].cached_blocks == 5


async def test_a_booking_that_is_never_confirmed_ends(pool: PoolStore, clock: HandClock) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes[:2]))
    await place(pool, "first", "a", chain=CHAIN)
    hits = []
    for sequence in range(1, 4):
        clock.advance(BOOKING_MS)
        await pool.kv_events.apply("a", fence, KvChange(sequence, 1.0))
        hits.append(await hit_of(pool))

    assert hits == [4, 2, 2]


async def test_bookings_of_a_partial_view_stay(pool: PoolStore, clock: HandClock) -> None:
    fence = await claimed(pool, KvViewStatus.PARTIAL)
    await place(pool, "first", "a", chain=CHAIN)
    for sequence in range(5):
        clock.advance(BOOKING_MS)
        await pool.kv_events.apply("a", fence, KvChange(sequence, 1.0))

    assert await hit_of(pool) == 4


async def test_placements_evict_nothing_that_the_engine_holds(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.members.update_instance("a", {"kv_capacity_tokens": 300, "dispatch_window_tokens": 10**6})
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes))
    for number in range(4):
        await place(pool, f"r{number}", "a", chain=chain(1000 + 2 * number, 1001 + 2 * number))

    assert await hit_of(pool) == 4
    assert (await pool.loads())["a"].cached_blocks == 4 + 3


async def test_a_view_that_is_dropped_is_empty(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes, (), {b"x": b"11"}))

    await pool.kv_events.mark("a", fence, KvViewStatus.PARTIAL, "events were missed", drop=True)

    assert (await hit_of(pool), await pool.kv_events.names("a"), (await pool.loads())["a"].cached_blocks) == (0, {}, 0)
    assert await record_of(pool) == KvEventRecord("a", "worker-1", fence, KvViewStatus.PARTIAL, "events were missed")


async def test_an_instance_that_went_down_is_claimed_again(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(3, 1.0, CHAIN.hashes, (), {b"x": b"11"}))

    await pool.members.set_instance_state("a", InstanceState.DOWN)

    with pytest.raises(LeaseLostError):
        await pool.kv_events.apply("a", fence, KvChange(4, 1.0, [99]))
    record = await pool.kv_events.claim("a", "worker-1")
    assert record is not None
    assert (record.status, record.sequence, await pool.kv_events.names("a")) == (KvViewStatus.ESTIMATE, None, {})


async def test_a_removed_instance_leaves_nothing(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(3, 1.0, CHAIN.hashes, (), {b"x": b"11"}))

    assert await pool.members.remove_instance("a")
    left = await pool._calls.command("EXISTS", *(of("a") for of in (KEYS.kv, KEYS.kv_events, KEYS.kv_names)))
    await pool.members.put_instance(instance("a"))

    assert left == 0
    assert (await pool.kv_events.records(), await pool.kv_events.names("a")) == ({"a": KvEventRecord("a")}, {})
    with pytest.raises(LeaseLostError):
        await pool.kv_events.apply("a", fence, KvChange(4, 1.0, [99]))


async def test_reading_events_does_not_touch_plans(pool: PoolStore) -> None:
    fence = await claimed(pool)
    before = await pool.queue_head("a")
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes))
    after = await pool.queue_head("a")

    assert before is not None
    assert after is not None
    assert before.load.version == after.load.version
    assert await lead(pool)


async def test_a_hit_ends_at_no_inner_block(pool: PoolStore) -> None:
    fence = await claimed(pool)
    blocks = CHAIN.hashes
    hits = []
    for ends, inner in ((blocks[:2], blocks[2:]), (blocks[2:3], blocks[1:2]), ((), blocks[:3]), (blocks[3:], ())):
        change = KvChange(0, 1.0, ends, inner=inner, hit_step_tokens=100)
        await pool.kv_events.apply("a", fence, change)
        hits.append((await pool.observe(["a"], chain(*blocks, prompt_tokens=450))).loads["a"].hit_blocks)

    assert hits == [2, 3, 0, 4]
    assert await hit_of(pool) == 0, "the last token of a prompt is computed, and no hit ends before its block"
    assert (await place(pool, "first", "a", chain=CHAIN)).chosen.uncached_tokens == 400


async def test_blocks_that_turn_are_no_bookings(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, inner=CHAIN.hashes, hit_step_tokens=100))

    booked = await pool.kv_events.apply("a", fence, KvChange(1, 1.0, CHAIN.hashes[:2], turned=2, hit_step_tokens=100))

    assert booked == 0


async def test_a_prompt_is_booked_with_the_hit_ends_that_it_leaves(pool: PoolStore) -> None:
    """Steps of 200 tokens: it leaves one at the last step, and one where what full attention holds ended."""
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, hit_step_tokens=200))
    first = chain(*range(11, 18), prompt_tokens=790)
    await place(pool, "first", "a", chain=first)
    longer = chain(*range(11, 31), prompt_tokens=2050)

    repeated = await pool.observe(["a"], first)
    branch = chain(*range(11, 16), *range(40, 46), prompt_tokens=1150)
    before = await pool.observe(["a"], branch)
    placed = await place(pool, "branch", "a", chain=branch)
    after = await pool.observe(["a"], chain(*range(11, 15), 50, 51, prompt_tokens=650))

    assert (repeated.loads["a"].hit_blocks, (await pool.observe(["a"], longer)).loads["a"].hit_blocks) == (6, 6)
    assert (before.loads["a"].hit_blocks, placed.chosen.uncached_tokens, after.loads["a"].hit_blocks) == (0, 1150, 4)


async def test_a_prompt_that_ends_with_a_step_leaves_the_hit_end_before_it(pool: PoolStore) -> None:
    """Its last token is computed in any case, and engines keep what they had before."""
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, hit_step_tokens=200))
    await place(pool, "first", "a", chain=chain(*range(11, 19), prompt_tokens=800))

    longer = await pool.observe(["a"], chain(*range(11, 31), prompt_tokens=2050))
    assert longer.loads["a"].hit_blocks == 6


async def test_a_request_held_for_an_instance_with_groups_is_counted_by_what_is_resident(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.kv_events.apply("a", fence, KvChange(0, 1.0, CHAIN.hashes[:2], inner=(13,), hit_step_tokens=100))
    busy, other = await place(pool, "busy", "a", tokens=4000), await place(pool, "other", "b")
    held = await hold(pool, "held", chain=chain(*CHAIN.hashes, 15, 16, prompt_tokens=650))
    again = await hold(pool, "again", chain=chain(*CHAIN.hashes, 15, 16, prompt_tokens=650))

    assert (held.uncached_tokens, again.uncached_tokens) == (450, 450)
    assert (busy.chosen.is_hybrid, other.chosen.is_hybrid) == (True, False)


async def test_an_engine_that_computes_the_last_block_of_a_hit_again_hits_one_less(pool: PoolStore) -> None:
    """Of what the prompt may hit: its last token is computed in any case. Other blocks stay as they are listed."""
    fence = await claimed(pool)
    await pool.members.update_instance("a", {"dropped_blocks": 1})
    prompts = [chain(*CHAIN.hashes, prompt_tokens=tokens) for tokens in (400, 401, 700)]
    hits = [await hit_of(pool)]
    for stored in (CHAIN.hashes[:1], CHAIN.hashes[1:]):
        await pool.kv_events.apply("a", fence, KvChange(0, 1.0, stored))
        hits += [(await pool.observe(["a"], prompt)).loads["a"].hit_blocks for prompt in prompts]

    placed = await place(pool, "first", "a", chain=prompts[2])
    await pool.members.update_instance("a", {"dropped_blocks": 0})

    assert hits == [0, 0, 0, 0, 2, 3, 3]
    assert (placed.chosen.uncached_tokens, placed.seen.loads["a"].hit_blocks) == (400, 3)
    assert await hit_of(pool) == 4


async def test_of_a_hybrid_model_a_hit_ends_before_the_block_that_is_computed_again(pool: PoolStore) -> None:
    fence = await claimed(pool)
    await pool.members.update_instance("a", {"dropped_blocks": 1})
    blocks, hits = CHAIN.hashes, []
    longer = chain(*blocks, 15, prompt_tokens=600)
    for ends, inner in ((blocks[3:], blocks[:3]), (blocks[1:2], ()), (blocks[2:3], ())):
        await pool.kv_events.apply("a", fence, KvChange(0, 1.0, ends, inner=inner, hit_step_tokens=100))
        hits.append((await pool.observe(["a"], longer)).loads["a"].hit_blocks)
    booked = chain(*range(21, 28), prompt_tokens=790)
    await place(pool, "first", "a", chain=booked)
    again = (await pool.observe(["a"], booked)).loads["a"].hit_blocks

    assert hits == [0, 2, 3]
    assert again == 6


async def test_what_such_an_engine_was_sent_is_resident_but_for_the_last_block_of_a_hit(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=401))
    await pool.members.update_instance("a", {"dropped_blocks": 1})
    await place(pool, "first", "a", chain=CHAIN)
    again = chain(*CHAIN.hashes, 15, prompt_tokens=500)
    held = await hold(pool, "again", "a", chain=again)

    assert held.uncached_tokens == 200
