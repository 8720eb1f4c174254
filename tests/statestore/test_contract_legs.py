"""The store contract: the legs of split requests, on every backend."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import CHAIN, FIRST, assert_sums_hold, finish, first_token, instance, lead, place, record

LEAST_LOADED = Weights(Form(ahead_s=1.0, kv_demand=4.0), PLAIN_TTFT)


@pytest.fixture
async def split_pool(pool: PoolStore) -> PoolStore:
    await pool.members.put_instance(instance("p", role=Role.PREFILL))
    await pool.members.put_instance(instance("d", role=Role.DECODE))
    return pool


def either(split_costs: float, whole_costs: float) -> dict[str, Any]:
    """A request that may be split, or served whole by ``d``."""
    other = Weighing(Leg.WHOLE, ("d",), FIRST, Form(constant=whole_costs))
    return {"leg": Leg.PREFILL, "decider": Form(constant=split_costs), "other": other}


@pytest.mark.parametrize(
    ("split_costs", "whole_costs", "leg", "where"),
    [(1.0, 2.0, Leg.PREFILL, "p"), (2.0, 1.0, Leg.WHOLE, "d"), (1.0, 1.0, Leg.PREFILL, "p")],
)
async def test_a_request_is_split_unless_serving_it_whole_costs_less(
    split_pool: PoolStore, split_costs: float, whole_costs: float, leg: Leg, where: str
) -> None:
    reply = await place(split_pool, "r", "p", **either(split_costs, whole_costs))

    assert (reply.chosen.leg, reply.chosen.instance_id) == (leg, where)
    assert set(reply.seen.loads) == {"p", "d"}
    assert (await record(split_pool, "r")).leg is leg
    await assert_sums_hold(split_pool)


async def test_a_request_is_served_whole_where_no_prefill_instance_takes_it(split_pool: PoolStore) -> None:
    reply = await place(split_pool, "r", "nobody", **either(0.0, 1e9))

    assert (reply.status, reply.chosen.leg, reply.chosen.instance_id) == (PlaceStatus.DISPATCHED, Leg.WHOLE, "d")


async def test_a_request_is_split_where_no_instance_takes_it_whole(split_pool: PoolStore) -> None:
    reply = await place(split_pool, "r", "p", excluded=frozenset({"d"}), **either(1e9, 0.0))

    assert (reply.status, reply.chosen.leg, reply.chosen.instance_id) == (PlaceStatus.DISPATCHED, Leg.PREFILL, "p")


async def test_no_prefill_leg_is_placed_on_a_decode_instance_and_no_decode_leg_on_a_prefill_instance(
    split_pool: PoolStore,
) -> None:
    assert (await place(split_pool, "one", "d", leg=Leg.PREFILL)).status is PlaceStatus.NOT_READY
    assert (await place(split_pool, "two", "p", leg=Leg.DECODE)).status is PlaceStatus.NOT_READY


async def test_a_decode_leg_takes_kv_memory_and_a_sequence_and_no_prefill(split_pool: PoolStore) -> None:
    reply = await place(split_pool, decode_leg_id("r"), "d", leg=Leg.DECODE, chain=CHAIN)

    load, stored = (await split_pool.loads())["d"], await record(split_pool, decode_leg_id("r"))
    assert (reply.status, reply.chosen.leg) == (PlaceStatus.DISPATCHED, Leg.DECODE)
    assert stored.state is RequestState.PREFILLED
    assert stored.uncached_tokens == reply.chosen.uncached_tokens == CHAIN.prompt_tokens
    assert (load.pending_tokens, load.dispatched_tokens, load.running_requests) == (0, 0, 1)
    assert load.context_tokens == CHAIN.prompt_tokens + stored.expected_output_tokens
    assert load.window_tokens == 0
    await assert_sums_hold(split_pool)


async def test_a_decode_leg_waits_in_no_queue(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("d", max_running_requests=1, max_queued_requests=0))
    await place(pool, "running", "d")

    reply = await place(pool, decode_leg_id("r"), "d", leg=Leg.DECODE)

    assert reply.status is PlaceStatus.DISPATCHED


async def test_a_decode_leg_leaves_its_prefix_where_it_was_decoded(split_pool: PoolStore) -> None:
    await place(split_pool, decode_leg_id("r"), "d", leg=Leg.DECODE, chain=CHAIN)

    seen = await split_pool.observe(["d"], CHAIN)

    assert seen.loads["d"].hit_blocks == len(CHAIN.hashes)


async def test_a_decode_leg_is_no_arrival_and_holds_no_prefix_index(split_pool: PoolStore) -> None:
    await place(split_pool, "r", "p", leg=Leg.PREFILL, chain=CHAIN)
    await place(split_pool, decode_leg_id("r"), "d", leg=Leg.DECODE, chain=CHAIN)

    assert len(await split_pool.publications.arrivals("0", 10)) == 1


async def test_a_prefill_leg_keeps_its_prompt_in_memory_until_it_is_finished(split_pool: PoolStore) -> None:
    await place(split_pool, "r", "p", leg=Leg.PREFILL, tokens=400)
    await first_token(split_pool, "r", "p")

    staged = (await split_pool.loads())["p"]
    await finish(split_pool, "r")

    assert (staged.pending_tokens, staged.context_tokens, staged.running_requests) == (0, 400, 1)
    assert (await split_pool.loads())["p"].context_tokens == 0


async def test_the_least_loaded_of_a_side_are_those_of_its_roles(split_pool: PoolStore) -> None:
    for name, role in (("p2", Role.PREFILL), ("d2", Role.DECODE), ("m", Role.MIXED)):
        await split_pool.members.put_instance(instance(name, role=role))
    for number in range(3):
        await place(split_pool, f"busy{number}", "d", leg=Leg.DECODE, tokens=3000)
        await place(split_pool, f"also busy{number}", "m", leg=Leg.DECODE, tokens=3000)

    roles = (Role.DECODE, Role.MIXED)
    reply = await place(split_pool, "r~", "d", leg=Leg.DECODE, weights=LEAST_LOADED, beyond_from_s=0.0, roles=roles)

    assert reply.chosen.instance_id == "d2"


async def test_an_instance_that_changes_its_role_changes_sides(split_pool: PoolStore) -> None:
    await place(split_pool, "busy", "d", leg=Leg.DECODE, tokens=3000)
    await split_pool.members.put_instance(instance("x", role=Role.PREFILL))
    beyond = {"weights": LEAST_LOADED, "beyond_from_s": 0.0, "roles": (Role.DECODE,)}

    before = await place(split_pool, "one~", "d", leg=Leg.DECODE, **beyond)
    await split_pool.members.update_instance("x", {"role": Role.DECODE})
    after = await place(split_pool, "two~", "d", leg=Leg.DECODE, **beyond)

    assert (before.chosen.instance_id, after.chosen.instance_id) == ("d", "x")


async def test_a_prefill_leg_moves_among_those_that_prefill(split_pool: PoolStore) -> None:
    await split_pool.members.update_instance("p", {"max_running_requests": 1})
    await split_pool.members.put_instance(instance("m", role=Role.MIXED))
    await place(split_pool, "busy", "p", leg=Leg.PREFILL)
    await place(split_pool, "held", "p", leg=Leg.PREFILL)
    fence, held = await lead(split_pool), await record(split_pool, "held")

    to_decode = await split_pool.queues.migrate(held, "d", reason="benefit", fence=fence)
    to_mixed = await split_pool.queues.migrate(held, "m", reason="benefit", fence=fence)

    assert (to_decode.status, to_mixed.status) == ("not_ready", "migrated")
    assert (await record(split_pool, "held")).leg is Leg.PREFILL


async def test_a_repetition_is_told_the_leg(split_pool: PoolStore) -> None:
    first = await place(split_pool, "r", "p", **either(1.0, 2.0))
    again = await place(split_pool, "r", "p", **either(2.0, 1.0))

    assert (first.chosen.leg, again.chosen.leg, again.chosen.instance_id) == (Leg.PREFILL, Leg.PREFILL, "p")
