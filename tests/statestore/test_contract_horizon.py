"""The store contract: what an observation tells beyond the instances asked for, on every backend."""

from __future__ import annotations

import pytest

from scheduling.chain import Chain
from scheduling.decision import Horizon
from scheduling.instance import InstanceState, Role
from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore
from tests.statestore.samples import CHAIN, SCHEDULING, HandClock, chain, instance, reservation

TWENTY = tuple(range(1, 21))
"""Two marks: one every ten blocks of a hundred tokens."""


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap-wide", queue_order="deadline", holder_marks=4)


async def horizon(pool: PoolStore, asked: Chain = CHAIN) -> Horizon:
    seen = await pool.observe(["a"], asked, horizon=True)
    assert seen.horizon is not None
    return seen.horizon


async def holders(pool: PoolStore, asked: Chain) -> tuple[tuple[str, ...], int]:
    seen = await horizon(pool, asked)
    return seen.holders, seen.holder_blocks


async def give(pool: PoolStore, request_id: str, instance_id: str, given: Chain) -> None:
    """Reserve and finish: the prefix was there once."""
    await pool.reserve(reservation(request_id, instance_id, chain=given))
    await pool.finish(request_id)


async def three_instances(pool: PoolStore) -> None:
    for instance_id in "abc":
        await pool.put_instance(instance(instance_id))


async def test_an_observation_carries_a_horizon_only_when_asked(pool: PoolStore) -> None:
    await three_instances(pool)

    plain = await pool.observe(["a"], CHAIN)
    wide = await pool.observe(["a"], CHAIN, horizon=True)

    assert plain.horizon is None
    assert wide.horizon is not None
    assert wide.loads == plain.loads
    assert (wide.epoch, wide.sequence) == (plain.epoch, plain.sequence + 1)


# holders -----------------------------------------------------------------------------------------------------
async def test_the_last_two_instances_that_were_given_a_prefix_are_known_latest_first(pool: PoolStore) -> None:
    await three_instances(pool)
    assert await holders(pool, CHAIN) == ((), 0)

    for number, instance_id in enumerate("abcb"):
        await give(pool, f"r{number}", instance_id, CHAIN)

    assert await holders(pool, CHAIN) == (("b", "c"), 4)


async def test_the_deepest_known_mark_counts(pool: PoolStore) -> None:
    await three_instances(pool)
    await give(pool, "shorter", "a", chain(*TWENTY[:10], 91))
    await give(pool, "longer", "b", chain(*TWENTY, 92))

    assert await holders(pool, chain(*TWENTY, 92)) == (("b",), 21)
    assert await holders(pool, chain(*TWENTY, 93)) == (("b",), 20)
    assert await holders(pool, chain(*TWENTY[:19], 94, 95)) == (("b", "a"), 10)
    assert await holders(pool, chain(*TWENTY[:9], 96, 97)) == ((), 0)


async def test_the_last_full_block_is_found_though_it_stands_between_marks(pool: PoolStore) -> None:
    await three_instances(pool)
    given = chain(*TWENTY[:13], prompt_tokens=1350)
    await give(pool, "one", "c", given)

    assert await holders(pool, given) == (("c",), 13)


async def test_a_prompt_shorter_than_a_block_has_no_holders(pool: PoolStore) -> None:
    await three_instances(pool)
    short = chain(5, prompt_tokens=60)
    await give(pool, "short", "a", short)

    assert await holders(pool, short) == ((), 0)


@pytest.mark.parametrize("state", [state for state in InstanceState if state is not InstanceState.READY])
async def test_only_ready_instances_are_named(pool: PoolStore, state: InstanceState) -> None:
    await three_instances(pool)
    await give(pool, "one", "a", CHAIN)
    await give(pool, "two", "b", CHAIN)

    await pool.set_instance_state("b", state)
    assert await holders(pool, CHAIN) == (("a",), 4)
    await pool.set_instance_state("a", state)
    assert await holders(pool, CHAIN) == ((), 0)
    assert [name for name, _ in (await horizon(pool)).lightest] == ["c"]


async def test_a_removed_instance_is_named_no_more(pool: PoolStore) -> None:
    await three_instances(pool)
    await give(pool, "one", "b", CHAIN)

    await pool.remove_instance("b")

    assert await horizon(pool) == Horizon((), 0, (("a", 0.0), ("c", 0.0)))


async def test_a_request_that_moved_is_held_where_its_prefill_was_done(pool: PoolStore) -> None:
    lease = await pool.acquire_lease("worker", 60_000)
    assert lease is not None
    await pool.put_instance(instance("a", dispatch_window_tokens=1))
    await pool.put_instance(instance("b"))
    await pool.reserve(reservation("running", chain=chain(91)))
    await pool.reserve(reservation("moved", chain=CHAIN))
    await pool.migrate("moved", "a", "b", reason="benefit", fence=lease.fence)
    assert await holders(pool, CHAIN) == (("a",), 4)

    await pool.first_token("moved", "b", CHAIN)

    assert await holders(pool, CHAIN) == (("b", "a"), 4)


async def test_what_is_not_given_again_for_a_generation_is_forgotten(pool: PoolStore) -> None:
    """A generation has four marks; the fifth ends it."""
    await three_instances(pool)
    await give(pool, "old", "a", chain(1))
    await give(pool, "kept", "b", chain(2))
    for number in range(3, 6):
        await give(pool, f"r{number}", "c", chain(number))
    assert await holders(pool, chain(1)) == (("a",), 1), "an older generation is still remembered"

    await give(pool, "kept again", "a", chain(2))
    for number in range(6, 10):
        await give(pool, f"r{number}", "c", chain(number))

    assert await holders(pool, chain(1)) == ((), 0)
    assert await holders(pool, chain(2)) == (("a", "b"), 1)


# the lightest ------------------------------------------------------------------------------------------------
async def test_the_two_with_the_least_work_in_time_are_named_with_it(
    pool: PoolStore, scheduling: SchedulingSettings
) -> None:
    for instance_id in "abcd":
        await pool.put_instance(instance(instance_id, prefill_tokens_per_s=1000.0, kv_capacity_tokens=100_000))
    for number, (instance_id, tokens) in enumerate((("a", 500), ("b", 300), ("c", 700), ("d", 900))):
        await pool.reserve(reservation(f"r{number}", instance_id, uncached_tokens=tokens))

    first, second = (await horizon(pool)).lightest

    assert (first[0], second[0]) == ("b", "a")
    assert first[1] == pytest.approx(0.3 + 350 / 100_000 * scheduling.kv_weight_s)
    assert second[1] == pytest.approx(0.5 + 550 / 100_000 * scheduling.kv_weight_s)


async def test_of_two_idle_instances_the_one_with_more_free_memory_comes_first(pool: PoolStore) -> None:
    await three_instances(pool)
    for request_id, instance_id in (("one", "a"), ("two", "a"), ("three", "b")):
        await pool.reserve(reservation(request_id, instance_id))
        await pool.first_token(request_id, instance_id, CHAIN)

    assert [name for name, _ in (await horizon(pool)).lightest] == ["c", "b"]
    await pool.remove_instance("c")
    assert [name for name, _ in (await horizon(pool)).lightest] == ["b", "a"]


async def test_a_busier_instance_with_more_free_memory_comes_before_a_full_one(pool: PoolStore) -> None:
    for instance_id in "ab":
        await pool.put_instance(instance(instance_id, prefill_tokens_per_s=1000.0, kv_capacity_tokens=1000))
    await pool.reserve(
        reservation("full", "a", chain=chain(*range(9)), uncached_tokens=100, expected_output_tokens=500)
    )
    await pool.reserve(reservation("busy", "b", chain=chain(1), uncached_tokens=1000, expected_output_tokens=1))

    assert [name for name, _ in (await horizon(pool)).lightest] == ["b", "a"]


async def test_work_that_stepped_behind_does_not_count_as_load(pool: PoolStore) -> None:
    await pool.put_instance(instance("a", dispatch_window_tokens=1, prefill_tokens_per_s=100.0, max_queued_requests=9))
    await pool.reserve(reservation("running"))
    in_time_s = (await horizon(pool)).lightest[0][1]

    for number in range(5):
        await pool.reserve(reservation(f"late {number}", slo_ms=1))

    assert (await horizon(pool)).lightest == (("a", in_time_s),)


async def test_a_faster_rate_makes_lighter(pool: PoolStore, clock: HandClock) -> None:
    await pool.put_instance(instance("a", prefill_tokens_per_s=100.0))
    await pool.reserve(reservation("one", slo_ms=60_000))
    await pool.reserve(reservation("two", slo_ms=60_000))
    before_s = (await horizon(pool)).lightest[0][1]

    clock.advance(40)
    await pool.first_token("one", "a", CHAIN)

    assert (await horizon(pool)).lightest[0][1] < before_s / 3


async def test_decode_instances_are_not_named(pool: PoolStore) -> None:
    await pool.put_instance(instance("a"))
    await pool.put_instance(instance("decoder", role=Role.DECODE))

    assert [name for name, _ in (await horizon(pool)).lightest] == ["a"]


class TestPoolsWhosePolicyDoesNotLookBeyond:
    @pytest.fixture
    def scheduling(self) -> SchedulingSettings:
        return SCHEDULING

    async def test_they_remember_no_holders(self, pool: PoolStore) -> None:
        await three_instances(pool)
        await give(pool, "one", "a", CHAIN)

        assert await horizon(pool) == Horizon((), 0, (("a", 0.0), ("b", 0.0)))
