"""Adapters of instances, on every store."""

from __future__ import annotations

import random

import pytest

from dualmap.scheduling.estimates.adapters import Residency
from dualmap.scheduling.placing.placement import PlaceReply
from dualmap.scheduling.state.adapter_wait import AdapterWait
from dualmap.scheduling.state.instance import InstanceState
from dualmap.simulation.engine.adapter_slots import AdapterMemory, AdapterSlots
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.adapters import RUNNING_SCORE, SETTLED_MS, AdapterUse
from tests.statestore.samples import LEAST_TTFT, HandClock, finish, instance, place, record

HOST_S, DISK_S = 0.02, 0.5


async def with_slots(pool: PoolStore, *names: str, slots: int = 2, host_slots: int = 4) -> None:
    room = {"adapter_slots": slots, "adapter_host_slots": host_slots, "adapter_host_ms": 20, "adapter_disk_ms": 500}
    for name in names:
        await pool.members.put_instance(instance(name, dispatch_window_tokens=10**6, max_running_requests=99, **room))


async def used(pool: PoolStore, *adapters: str, clock: HandClock) -> None:
    """Requests of these adapters on instance ``a``, one after the other."""
    for adapter in adapters:
        clock.advance(1000)
        await place(pool, f"for {adapter}", adapter=adapter, tokens=100)
        await finish(pool, f"for {adapter}")


def wait_s(reply: PlaceReply, name: str = "a") -> float:
    """Time of the adapter's loads; there is a slot for it."""
    wait = reply.seen.loads[name].adapter
    assert wait.turns == 0
    return wait.host_s + wait.disk_s


async def test_an_adapter_costs_what_its_place_by_last_use_says(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    first = await place(pool, "first", adapter="one")
    await finish(pool, "first")
    await used(pool, "two", "three", "four", clock=clock)
    waits = [wait_s(await place(pool, name, adapter=name)) for name in ("four",)]
    await finish(pool, "four")
    from_host = await place(pool, "again", adapter="one")

    assert wait_s(first) == pytest.approx(HOST_S + DISK_S)
    assert waits == [0.0]
    assert wait_s(from_host) == pytest.approx(HOST_S)


async def test_an_adapter_beyond_host_memory_comes_from_disk_again(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    await used(pool, "one", "two", "three", "four", "five", clock=clock)

    assert wait_s(await place(pool, "again", adapter="one")) == pytest.approx(HOST_S + DISK_S)


async def test_adapters_of_running_requests_keep_their_slots(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    await place(pool, "long", adapter="one")
    await used(pool, "two", "three", "four", clock=clock)

    assert wait_s(await place(pool, "again", adapter="one")) == 0.0


async def test_a_request_waits_where_adapters_of_others_have_all_slots(pool: PoolStore) -> None:
    await with_slots(pool, "a")
    await place(pool, "first", adapter="one")
    await place(pool, "second", adapter="two")

    third = await place(pool, "third", adapter="three")
    fourth = await place(pool, "fourth", adapter="four")

    assert third.seen.loads["a"].adapter == AdapterWait(HOST_S, DISK_S, 0.5)
    assert fourth.seen.loads["a"].adapter == AdapterWait(HOST_S, DISK_S, 1.0)


async def test_a_request_goes_where_its_adapter_is(pool: PoolStore) -> None:
    await with_slots(pool, "a", "b")
    await place(pool, "first", "b", adapter="one")
    await finish(pool, "first")
    reply = await place(pool, "again", "a", "b", adapter="one", weights=LEAST_TTFT)

    assert reply.chosen.instance_id == "b"
    assert (wait_s(reply, "a"), wait_s(reply, "b")) == (pytest.approx(HOST_S + DISK_S), 0.0)


async def test_what_is_held_uses_no_adapter_before_it_is_dispatched(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a", adapter_slots=1, adapter_host_slots=1, adapter_disk_ms=500))
    for name in ("one", "two"):
        await place(pool, name, tokens=700)
    held = await place(pool, "held", adapter="x", tokens=700, rank_ms=1, defers=True)

    assert held.status.value == "held"
    assert wait_s(await place(pool, "other", adapter="x", tokens=700, rank_ms=1, defers=True)) > 0


async def test_without_slots_and_without_an_adapter_nothing_waits(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await with_slots(pool, "b")

    assert wait_s(await place(pool, "first", "a", adapter="one")) == 0.0
    assert wait_s(await place(pool, "second", "b"), "b") == 0.0


async def test_a_restarted_engine_has_no_adapters(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    await used(pool, "one", clock=clock)
    for state in (InstanceState.DOWN, InstanceState.STARTING, InstanceState.READY):
        await pool.members.set_instance_state("a", state)

    assert wait_s(await place(pool, "again", adapter="one")) == pytest.approx(HOST_S + DISK_S)


async def test_a_name_that_needs_quotes_is_kept(pool: PoolStore) -> None:
    await with_slots(pool, "a")
    await place(pool, "first", adapter='a "b" \\ c')

    assert (await record(pool, "first")).adapter == 'a "b" \\ c'
    assert wait_s(await place(pool, "second", adapter='a "b" \\ c')) == 0.0


async def test_the_load_of_an_adapter_of_a_higher_rank_takes_longer(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a", slots=1, host_slots=2)
    await used(pool, "one", "two", clock=clock)

    assert wait_s(await place(pool, "from disk", adapter="new", adapter_share=4.0)) == pytest.approx(
        4 * (HOST_S + DISK_S)
    )
    clock.advance(1000)
    await finish(pool, "from disk")
    assert wait_s(await place(pool, "from host", adapter="two", adapter_share=0.5)) == pytest.approx(0.5 * HOST_S)


BASE = {"default": ""}


def listing(*names: str, path: str = "/adapters") -> dict[str, object]:
    return {"models": BASE | dict.fromkeys(names, "default"), "adapters": {name: f"{path}/{name}" for name in names}}


async def order(pool: PoolStore) -> list[tuple[str, int]]:
    """Adapters of instance ``a`` with their running requests, the last used first."""
    return [(use.adapter, use.running) for use in (await pool.members.adapters(["a"]))[0]["a"]]


async def test_what_an_instance_lists_newly_was_loaded_just_now(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a", slots=1, host_slots=3)
    await pool.members.update_instance("a", listing("one"))
    await used(pool, "one", "two", clock=clock)
    await place(pool, "runs", adapter="two")
    clock.advance(1000)

    await pool.members.update_instance("a", listing("one", "two", "three"))
    assert await order(pool) == [("two", 1), ("three", 0), ("one", 0)]
    await pool.members.update_instance("a", {"max_running_requests": 50})
    assert await order(pool) == [("two", 1), ("three", 0), ("one", 0)]


async def test_an_adapter_that_is_listed_with_another_path_was_loaded_just_now(
    pool: PoolStore, clock: HandClock
) -> None:
    await with_slots(pool, "a")
    await pool.members.update_instance("a", listing("one", "two"))
    await used(pool, "one", "two", clock=clock)
    clock.advance(1000)
    replaced = listing("one", "two")
    replaced["adapters"] = {"one": "/new/one", "two": "/adapters/two"}

    await pool.members.update_instance("a", replaced)

    assert await order(pool) == [("one", 0), ("two", 0)]


async def test_a_name_that_an_instance_lists_no_more_is_to_be_loaded_again(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    await pool.members.update_instance("a", listing("one", "two"))
    await used(pool, "one", "two", "resolved", clock=clock)
    await place(pool, "late", adapter="two")

    await pool.members.update_instance("a", listing("one"))
    assert await order(pool) == [("resolved", 0), ("one", 0)]
    await finish(pool, "late")
    assert wait_s(await place(pool, "again", adapter="two")) == pytest.approx(HOST_S + DISK_S)
    await pool.members.update_instance("a", {"models": None, "adapters": None})
    assert len(await order(pool)) == 3, "what it has is not known"


async def test_a_restarted_engine_has_what_it_lists(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    await pool.members.update_instance("a", listing("one", "two"))
    await used(pool, "two", "one", "resolved", clock=clock)
    await pool.members.set_instance_state("a", InstanceState.DOWN)
    assert await order(pool) == []

    await pool.members.set_instance_state("a", InstanceState.STARTING)

    assert await order(pool) == [("two", 0), ("one", 0)]


async def test_an_instance_whose_room_becomes_known_has_what_it_lists(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await pool.members.update_instance("a", listing("one", "two", "three"))
    assert await order(pool) == []

    await pool.members.update_instance("a", {"adapter_slots": 1, "adapter_host_slots": 2})

    assert await order(pool) == [("three", 0), ("two", 0)]


async def test_an_adapter_that_is_used_past_the_fleet_is_the_last_used(pool: PoolStore, clock: HandClock) -> None:
    lease = await pool.leader_lease.acquire("one", 60_000)
    assert lease is not None
    await with_slots(pool, "a", slots=1, host_slots=3)
    await used(pool, "one", "two", clock=clock)
    await place(pool, "runs", adapter="two")
    clock.advance(1000)
    spec = (await pool.membership()).instances["a"]

    await pool.members.note_adapters(spec, ["two", "one", "strange"], fence=lease.fence)
    assert await order(pool) == [("two", 1), ("strange", 0), ("one", 0)]
    await finish(pool, "runs")
    assert await order(pool) == [("two", 0), ("strange", 0), ("one", 0)]


async def test_what_an_engine_reports_to_have_corrects_the_order(pool: PoolStore, clock: HandClock) -> None:
    lease = await pool.leader_lease.acquire("one", 60_000)
    assert lease is not None
    await with_slots(pool, "a", slots=2, host_slots=5)
    await used(pool, "evicted", "device", "host", "runs", clock=clock)
    await place(pool, "running", adapter="runs")
    clock.advance(SETTLED_MS + 1000)
    await used(pool, "just used", clock=clock)
    spec = (await pool.membership()).instances["a"]
    resident = Residency(frozenset({"device"}), frozenset({"device", "host", "never seen"}))

    await pool.members.note_adapters(spec, [], resident, fence=lease.fence)
    corrected = await order(pool)
    await pool.members.note_adapters(spec, [], resident, fence=lease.fence)

    assert corrected == [("runs", 1), ("just used", 0), ("device", 0), ("host", 0), ("never seen", 0)]
    assert await order(pool) == corrected


@pytest.mark.parametrize("seed", range(5))
async def test_the_books_follow_what_an_engine_does(pool: PoolStore, clock: HandClock, seed: int) -> None:
    """Before each request the books say where the engine model has its adapter."""
    rng, slots = random.Random(seed), AdapterSlots(AdapterMemory(2, 4, HOST_S, DISK_S))
    await with_slots(pool, "a")
    running: dict[str, str] = {}
    for number in range(60):
        clock.advance(1000)
        adapter, request_id = f"adapter {rng.randrange(8)}", f"request {number}"
        if running and (rng.random() < 0.5 or not slots.may_run(adapter)):
            ended = rng.choice([*running])
            slots.leave(running.pop(ended))
            await finish(pool, ended)
            continue
        where = 0.0 if adapter in slots.on_device else HOST_S if adapter in slots.in_host else HOST_S + DISK_S
        reply = await place(pool, request_id, adapter=adapter, tokens=100)
        assert wait_s(reply) == pytest.approx(where), (number, adapter)
        assert slots.enter(adapter) == pytest.approx(where)
        running[request_id] = adapter


async def test_wrong_numbers_of_running_requests_are_repaired(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a")
    await place(pool, "first", adapter="one")
    await used(pool, "two", clock=clock)
    key, calls = pool._keys.adapters("a"), pool._calls
    await calls.command("ZADD", key, RUNNING_SCORE + 7, "one", RUNNING_SCORE + 1, "two")
    lease = await pool.leader_lease.acquire("worker-1", 10_000)
    assert lease is not None
    fence = lease.fence
    repaired = await pool.upkeep.repair(fence=fence)
    scores = await calls.command("ZRANGE", key, 0, -1, "WITHSCORES")

    assert repaired == 1
    assert dict(zip(scores[::2], map(int, scores[1::2]), strict=True)) == {
        b"one": RUNNING_SCORE + 1,
        b"two": clock.now_ms,
    }
    assert await pool.upkeep.repair(fence=fence) == 0


async def test_people_see_the_last_used_first_and_how_many_requests_run(pool: PoolStore, clock: HandClock) -> None:
    await with_slots(pool, "a", "b")
    await used(pool, "one", "two", clock=clock)
    await place(pool, "first", adapter="one")
    await place(pool, "second", adapter="one")
    uses, now_ms = await pool.members.adapters(["a", "b"])

    assert uses == {"a": (AdapterUse("one", 2, 0), AdapterUse("two", 0, clock.now_ms)), "b": ()}
    assert now_ms == clock.now_ms
