"""The store contract: a placement that leaves nothing to weigh is reserved as it is observed, on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduling.chain import Chain
from scheduling.decision import Decision, Reason
from scheduling.instance import InstanceState, Role
from scheduling.settings import SchedulingSettings
from scheduling.ttft_model import TtftFeatures
from statestore.base import Observation, PoolStore, RequestState
from statestore.reservation import Newcomer, ReserveStatus
from tests.statestore.samples import CHAIN, HandClock, chain, instance, reservation


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap-wide", queue_order="deadline")


@pytest.fixture(autouse=True)
async def pair(pool: PoolStore) -> None:
    for instance_id in "abc":
        await pool.put_instance(instance(instance_id))


def newcomer(request_id: str, asked: Chain = CHAIN, **changes: Any) -> Newcomer:
    return replace(Newcomer(request_id, "router-1", asked, expected_output_tokens=100, slo_ms=5000), **changes)


async def reserved(pool: PoolStore, request: Newcomer, candidates: tuple[str, ...] = ("a", "b")) -> Decision | None:
    return (await reserve_idle(pool, request, candidates))[1]


async def reserve_idle(
    pool: PoolStore, request: Newcomer, candidates: tuple[str, ...] = ("a", "b")
) -> tuple[Observation, Decision | None]:
    """What was seen, and the decision of what was reserved."""
    seen, placement = await pool.reserve_idle(candidates, request)
    if placement is None:
        return seen, None
    assert placement.reservation == request.reservation(placement.decision)
    return seen, placement.decision


async def given(pool: PoolStore, instance_id: str, asked: Chain) -> None:
    """The instance had the chain once, and is idle again."""
    await pool.reserve(reservation("given", instance_id, chain=asked))
    await pool.finish("given")


async def test_an_idle_pair_takes_a_new_prompt_on_its_first_ring(pool: PoolStore) -> None:
    seen, decision = await reserve_idle(pool, newcomer("r1"))

    assert decision == Decision(
        "a",
        hit_blocks=0,
        uncached_tokens=400,
        expected_ttft_s=pytest.approx(0.03 + 0.05),
        reason=Reason.COST,
        alternative_id="b",
        alternative_uncached_tokens=400,
        seen_pending_tokens=0,
        ttft_features=TtftFeatures(0, 50, 0, 0),
    )
    assert (seen.loads["a"].pending_tokens, seen.loads["a"].running_requests) == (0, 0), "as it was before"
    record = (await pool.records(["r1"]))["r1"]
    assert (record.instance_id, record.state, record.uncached_tokens) == ("a", RequestState.DISPATCHED, 400)
    assert (record.alternative_id, record.alternative_uncached_tokens, record.attempt) == ("b", 400, 1)
    loads = (await pool.observe(["a", "b"], CHAIN)).loads
    assert (loads["a"].pending_tokens, loads["a"].dispatched_tokens, loads["a"].hit_blocks) == (400, 400, 4)
    assert loads["b"].pending_tokens == 0


async def test_the_idle_one_that_holds_the_prefix_takes_it(pool: PoolStore) -> None:
    await given(pool, "b", CHAIN)

    decision = await reserved(pool, newcomer("r1", chain(11, 12, 13, 14, 9)))

    assert decision is not None
    assert (decision.instance_id, decision.reason) == ("b", Reason.CACHE)
    assert (decision.hit_blocks, decision.uncached_tokens, decision.alternative_uncached_tokens) == (4, 100, 500)


async def test_a_single_candidate_that_is_idle_is_taken(pool: PoolStore) -> None:
    decision = await reserved(pool, newcomer("r1"), ("b",))

    assert decision is not None
    assert (decision.instance_id, decision.reason, decision.alternative_id) == ("b", Reason.ONLY_ONE, None)


async def test_with_work_pending_where_it_is_cheapest_there_is_something_to_weigh(pool: PoolStore) -> None:
    await given(pool, "b", CHAIN)
    await pool.reserve(reservation("busy", "b", chain=chain(7, 8)))

    seen, decision = await reserve_idle(pool, newcomer("r1"))

    assert decision is None
    assert [load.hit_blocks for load in seen.loads.values()] == [0, 4]
    assert await pool.records(["r1"]) == {}


async def test_with_more_of_the_prefix_beyond_the_pair_there_is_something_to_weigh(pool: PoolStore) -> None:
    await given(pool, "c", chain(*range(1, 21)))

    seen, decision = await reserve_idle(pool, newcomer("r1", chain(*range(1, 31))))

    assert decision is None
    assert seen.horizon is not None
    assert (seen.horizon.holders, seen.horizon.holder_blocks) == (("c",), 20)


async def test_as_much_in_the_pair_as_beyond_it_leaves_nothing_to_weigh(pool: PoolStore) -> None:
    await given(pool, "c", chain(*range(1, 21)))
    await given(pool, "b", chain(*range(1, 21)))

    decision = await reserved(pool, newcomer("r1", chain(*range(1, 31))))

    assert decision is not None
    assert decision.instance_id == "b"


async def test_kv_memory_in_use_is_weighed(pool: PoolStore) -> None:
    await pool.reserve(reservation("decoding", "a", chain=chain(7, prompt_tokens=100), expected_output_tokens=500_000))
    await pool.first_token("decoding", "a", chain(7))

    decision = await reserved(pool, newcomer("r1"))

    assert decision is not None
    assert decision.instance_id == "b"


async def test_what_would_be_late_is_weighed(pool: PoolStore) -> None:
    long = chain(*range(1000))

    assert await reserved(pool, newcomer("r1", long, slo_ms=2000)) is None
    assert await reserved(pool, newcomer("r2", long, slo_ms=60_000)) is not None


@pytest.mark.parametrize("state", [state for state in InstanceState if state is not InstanceState.READY])
async def test_nothing_is_reserved_where_nobody_is_ready(pool: PoolStore, state: InstanceState) -> None:
    await pool.set_instance_state("a", state)

    assert await reserved(pool, newcomer("r1"), ("a",)) is None
    assert await pool.records(["r1"]) == {}


async def test_nothing_is_reserved_on_an_instance_that_takes_no_requests_or_has_no_room(pool: PoolStore) -> None:
    await pool.update_instance("a", {"role": Role.DECODE})
    await pool.update_instance("b", {"max_running_requests": 1})
    await pool.reserve(reservation("running", "b", chain=chain(7)))
    await pool.first_token("running", "b", chain(7))

    assert await reserved(pool, newcomer("r1"), ("a",)) is None
    assert await reserved(pool, newcomer("r1"), ("b",)) is None
    assert await pool.records(["r1"]) == {}


async def test_a_known_id_reserves_nothing(pool: PoolStore) -> None:
    await pool.reserve(reservation("r1", "c", replica_id="router-2"))

    assert await reserved(pool, newcomer("r1")) is None
    assert (await pool.records(["r1"]))["r1"].replica_id == "router-2"


async def test_what_was_reserved_lives_and_ends_like_any_request(pool: PoolStore, clock: HandClock) -> None:
    await pool.reserve_idle(("a", "b"), newcomer("r1"))
    repeated = await pool.reserve(reservation("r1", "a", replica_id="router-1"))
    assert repeated.status is ReserveStatus.DISPATCHED

    clock.now_ms += 200
    assert await pool.first_token("r1", "a", CHAIN)
    assert (await pool.observe(["a"], CHAIN)).loads["a"].ttft_weights != (0.03, 1.0, 1.0, 0.0, 0.0), "it taught"
    assert await pool.finish("r1", replica_id="router-1", attempt=1)

    load = (await pool.observe(["a"], CHAIN)).loads["a"]
    assert (load.pending_tokens, load.dispatched_tokens, load.context_tokens, load.running_requests) == (0, 0, 0, 0)


async def test_candidates_that_are_gone_are_left_out(pool: PoolStore) -> None:
    seen, decision = await reserve_idle(pool, newcomer("r1"), ("gone", "b"))

    assert decision is not None
    assert (decision.instance_id, decision.alternative_id, [*seen.loads]) == ("b", None, ["b"])
