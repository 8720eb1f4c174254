"""The store contract: first tokens, ends, what they teach, and grants as they are told; on every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import orjson
import pytest

from dualmap.scheduling.estimates.learning import EndSample, FirstTokenSample
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.queues.queue_order import PlanStep, QueuePlan
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.call_values import Transition
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import (
    CHAIN,
    HandClock,
    assert_sums_hold,
    finish,
    first_token,
    grant,
    instance,
    lead,
    place,
    record,
    within,
)


# first tokens ------------------------------------------------------------------------------------------------
async def test_a_first_token_releases_pending_tokens_once_and_tells_who_may_go(
    pool: PoolStore, clock: HandClock
) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=800))
    for request_id in ("one", "two", "three"):
        await place(pool, request_id)
    clock.advance(300)

    first, again = await first_token(pool, "one", "a"), await first_token(pool, "one", "a")

    load = (await pool.loads())["a"]
    assert (first.done, again) == (True, Transition(False))
    assert first.queue is not None
    assert [entry.request_id for entry in first.queue.entries] == ["three"]
    assert (load.pending_tokens, load.dispatched_tokens, load.running_requests) == (800, 400, 2)
    assert (await record(pool, "one")).prefilled_ms == clock.now_ms
    await assert_sums_hold(pool)


async def test_a_transition_without_anybody_waiting_tells_of_no_queue(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")

    assert [(await first_token(pool, "r", "a")).queue, (await finish(pool, "r")).queue] == [None, None]


async def test_the_first_token_of_a_held_unknown_or_moved_request_means_nothing(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    for request_id in ("sent", "held"):
        await place(pool, request_id)

    answers = [
        await first_token(pool, request_id, instance_id)
        for request_id, instance_id in (("held", "a"), ("unknown", "a"), ("sent", "b"), ("sent", "nobody"))
    ]

    assert answers == [Transition(False)] * 4
    await assert_sums_hold(pool)


@pytest.mark.parametrize("last", ["first token", "placement"])
async def test_a_stall_is_measured_from_the_later_of_work_and_the_last_first_token(
    pool: PoolStore, clock: HandClock, last: str
) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "one")
    clock.advance(1000)
    if last == "first token":
        await place(pool, "two")
        await first_token(pool, "one", "a")
    else:
        await first_token(pool, "one", "a")
        clock.advance(60_000)
        await place(pool, "two")
    clock.advance(1500)

    assert (await pool.loads())["a"].stalled_s == 1.5
    await finish(pool, "two")
    assert (await pool.loads())["a"].stalled_s == 0


async def test_a_first_token_that_is_presumed_ends_pending_work_and_no_silence(
    pool: PoolStore, clock: HandClock
) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "seen")
    clock.advance(1000)
    seen_ms = clock.now_ms
    await first_token(pool, "seen", "a")
    clock.advance(5000)
    await place(pool, "plain")
    clock.advance(2000)
    await first_token(pool, "plain", "a", seen=False)

    load, plain = (await pool.loads())["a"], await record(pool, "plain")
    assert (load.pending_tokens, load.dispatched_tokens, load.running_requests) == (0, 0, 2)
    assert (load.last_prefill_ms, load.silent_s) == (seen_ms, 7.0)
    assert (plain.state, plain.prefilled_ms) == (RequestState.PREFILLED, 0)
    await assert_sums_hold(pool)


@pytest.mark.parametrize(("seen", "silent_s"), [(True, 0.0), (False, 9.0)])
async def test_a_whole_answer_is_a_sign_of_life_and_an_end_without_one_is_none(
    pool: PoolStore, clock: HandClock, seen: bool, silent_s: float
) -> None:
    await pool.members.put_instance(instance("a"))
    for name in ("plain", "other"):
        await place(pool, name)
        await first_token(pool, name, "a", seen=False)
    clock.advance(9000)

    await finish(pool, "plain", seen=seen)

    assert (await pool.loads())["a"].silent_s == silent_s


async def test_an_instance_on_which_nothing_runs_is_not_silent(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))
    clock.advance(60_000)
    assert (await pool.loads())["a"].silent_s == 0
    await place(pool, "r")
    clock.advance(1500)
    assert (await pool.loads())["a"].silent_s == 1.5

    await finish(pool, "r")

    assert (await pool.loads())["a"].silent_s == 0


async def test_a_clock_that_is_set_back_stalls_nobody(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")
    clock.advance(-3_600_000)

    assert (await pool.loads())["a"].stalled_s == 0


async def test_a_sample_says_how_many_prefills_before_it_nobody_saw_end(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=4000))
    for name in ("one", "plain", "two", "answered", "three", "four"):
        await place(pool, name)
    await first_token(pool, "one", "a", note="{}")
    await first_token(pool, "plain", "a", note="{}", seen=False)
    await first_token(pool, "two", "a", note="{}")
    await finish(pool, "answered", seen=True)
    await first_token(pool, "three", "a", note="{}")
    await first_token(pool, "four", "a", note="{}")

    contents = [sample.content for sample in await pool.publications.samples("0", 10)]

    assert [content.unseen for content in contents if isinstance(content, FirstTokenSample)] == [0, 1, 1, 0]


# ends --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", RequestState)
async def test_finishing_releases_whatever_is_left_exactly_once(pool: PoolStore, state: RequestState) -> None:
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    if state is RequestState.HELD:
        await place(pool, "before")
    await place(pool, "r")
    if state is RequestState.PREFILLED:
        await first_token(pool, "r", "a")
    assert (await record(pool, "r")).state is state

    finished = [(await finish(pool, "r")).done for _ in range(2)]

    assert finished == [True, False]
    assert await pool.records(["r"]) == {}
    await assert_sums_hold(pool)
    await finish(pool, "before")
    load = (await pool.loads())["a"]
    assert (load.pending_tokens, load.dispatched_tokens, load.context_tokens, load.running_requests) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("who", "done"),
    [
        ({"replica_id": "two"}, False),
        ({"replica_id": "one"}, True),
        ({"attempt": 1}, False),
        ({"attempt": 2}, True),
        ({"attempt": 3}, True),
        ({"replica_id": "one", "attempt": 1}, False),
    ],
)
async def test_another_replicas_request_and_a_newer_attempt_are_left_alone(
    pool: PoolStore, who: dict[str, object], done: bool
) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r", replica_id="one", attempt=2)

    assert (await finish(pool, "r", **who)).done is done
    assert ("r" in await pool.records(["r"])) is not done
    await assert_sums_hold(pool)


async def test_finishing_a_request_that_moved_finds_it(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, dispatch_window_tokens=1))
        await place(pool, f"first-on-{name}", name)
    await place(pool, "r", "a")
    await pool.queues.migrate(await record(pool, "r"), "b", reason="benefit", fence=await lead(pool))

    assert (await finish(pool, "r")).done
    await assert_sums_hold(pool)


async def test_only_records_that_exist_are_told(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")

    assert list(await pool.records(["gone", "r"])) == ["r"]
    assert await pool.records([]) == {}


# what they teach ---------------------------------------------------------------------------------------------
async def test_a_noted_first_token_is_a_sample_with_its_times(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))
    start_ms = clock.now_ms
    await place(pool, "one")
    await place(pool, "two")
    clock.advance(700)
    await first_token(pool, "one", "a", note=orjson.dumps({"features": [1.0, 0.5]}).decode())
    clock.advance(800)
    await first_token(pool, "two", "a", note=orjson.dumps({"features": None}).decode())

    contents = [sample.content for sample in await pool.publications.samples("0", 10)]

    assert contents == [
        FirstTokenSample("a", 400, start_ms, start_ms, 0, start_ms + 700, (1.0, 0.5)),
        FirstTokenSample("a", 400, start_ms, start_ms, start_ms + 700, start_ms + 1500, None),
    ]


async def test_a_noted_end_is_a_sample_of_the_length_of_text(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")
    await finish(pool, "r", note=orjson.dumps({"text_bytes": 900, "tokens": 200}).decode())

    assert [sample.content for sample in await pool.publications.samples("0", 10)] == [EndSample(900, 200)]


async def test_transitions_without_a_note_and_repeated_ones_teach_nothing(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r")
    for _ in range(2):
        await first_token(pool, "r", "a")
        await first_token(pool, "r", "a", note='{"features": null}')
    await finish(pool, "r")
    await finish(pool, "r", note='{"text_bytes": 1, "tokens": 1}')

    assert list(await pool.publications.samples("0", 10)) == []


async def test_samples_are_read_on_from_the_last_one_seen(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    for number in range(3):
        await place(pool, "r")
        await finish(pool, "r", note=orjson.dumps({"text_bytes": number, "tokens": 1}).decode())

    first = await pool.publications.samples("0", 2)
    rest = await pool.publications.samples(first[-1].entry_id, 100)

    assert [sample.content for sample in (*first, *rest)] == [EndSample(number, 1) for number in range(3)]
    assert list(await pool.publications.samples(rest[-1].entry_id, 100)) == []


# observations ------------------------------------------------------------------------------------------------
async def test_an_observation_tells_loads_in_the_order_asked_and_is_numbered(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    await place(pool, "r", "b", chain=CHAIN)

    seen = [await pool.observe(["b", "nobody", "a"], CHAIN) for _ in range(2)]

    assert list(seen[0].loads) == ["b", "a"]
    assert [load.hit_blocks for load in seen[0].loads.values()] == [4, 0]
    assert [each.sequence for each in seen] == [1, 2]
    assert (seen[0].epoch, (await pool.observe([], CHAIN)).loads) == (2, {})


async def test_work_assigned_lately_fades(pool: PoolStore, clock: HandClock) -> None:
    await pool.members.put_instance(instance("a"))

    async def window_tokens() -> float:
        return (await pool.observe(["a"], CHAIN)).loads["a"].window_tokens

    before = await window_tokens()
    await place(pool, "one")
    await place(pool, "two", tokens=100)
    at_once = await window_tokens()
    await finish(pool, "one")
    clock.advance(180_000)

    assert (before, at_once, await window_tokens()) == (0, 500, pytest.approx(500 / 2.71828, rel=1e-4))


async def test_loads_of_one_moment_have_hits_only_where_a_chain_is_observed(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "one", chain=CHAIN)

    without = (await pool.loads())["a"]
    observed = (await pool.observe(["a"], CHAIN)).loads["a"]
    again = (await pool.loads())["a"]

    assert observed.hit_blocks > 0
    assert (without.hit_blocks, again.hit_blocks) == (0, 0)
    assert replace(observed, hit_blocks=0) == without == again


async def test_the_loads_of_named_instances_are_those_among_all_loads(pool: PoolStore) -> None:
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name))
    await place(pool, "one", chain=CHAIN)

    assert await pool.loads_of("b", "a", "unknown") == await pool.loads()
    assert await pool.loads_of("b") == {"b": (await pool.loads())["b"]}


# grants as they are told -------------------------------------------------------------------------------------
Listen = Callable[[str], Awaitable["asyncio.Queue[Grant]"]]


@pytest.fixture
async def listening(pool: PoolStore) -> Listen:
    """Starts listening for a replica; returns once grants do arrive."""

    async def listen(replica_id: str) -> asyncio.Queue[Grant]:
        grants: asyncio.Queue[Grant] = asyncio.Queue()
        pool.on_grant(replica_id, grants.put_nowait)
        await pool.members.put_instance(instance("probe", dispatch_window_tokens=1))
        await place(pool, "first", "probe")
        async with asyncio.timeout(60):
            for number in range(1000):
                await place(pool, f"probe{number}", "probe", replica_id=replica_id)
                queue = await pool.queue_head("probe")
                assert queue is not None
                await pool.commit(QueuePlan("probe", queue.load.version, (PlanStep(f"probe{number}"),)))
                await finish(pool, f"probe{number}")
                try:
                    await asyncio.wait_for(grants.get(), 0.05)
                    break
                except TimeoutError:
                    continue
        await finish(pool, "first")
        await pool.members.remove_instance("probe")
        while not grants.empty():
            grants.get_nowait()
        return grants

    return listen


async def test_a_grant_reaches_the_replica_that_owns_the_request_and_no_other(
    pool: PoolStore, listening: Listen
) -> None:
    one, two = await listening("one"), await listening("two")
    await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
    await place(pool, "sent", replica_id="one")
    await place(pool, "held", replica_id="two")

    assert await grant(pool, (await finish(pool, "sent")).queue) == 1

    assert await within(two.get()) == Grant("held", "a", "two", 1, 400)
    assert one.empty()


async def test_the_replica_that_commits_a_plan_is_told_by_the_reply_alone(pool: PoolStore, listening: Listen) -> None:
    one, two = await listening("one"), await listening("two")
    await pool.members.put_instance(instance("a", dispatch_window_tokens=1))
    for request_id, replica_id in (("sent", "one"), ("first", "one"), ("second", "two")):
        await place(pool, request_id, replica_id=replica_id)
    queue = await pool.queue_head("a")
    assert queue is not None

    plan = QueuePlan("a", queue.load.version, (PlanStep("first"), PlanStep("second")))
    reply = await pool.commit(plan, replica_id="one")

    assert [each.request_id for each in reply.grants] == ["first", "second"]
    assert (await within(two.get())).request_id == "second"
    assert one.empty()
