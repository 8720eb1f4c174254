"""A replica's standing: its lease, and what it gives back or cleans up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.errors import StoreSchemaError, StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool.schema import SCHEMA
from tests.router import tools
from tests.statestore.samples import finish


def swap_store(runtime: Any, store: Any) -> None:
    """The store behind a running replica comes back as another, empty one."""
    failover, primary = runtime.pools.pools["default"].store, store.pool("default")
    failover._primary = primary
    failover.members, failover.settings = primary.members, primary.settings


async def test_configured_instances_enter_an_empty_store_as_starting(start_runtime: Any, store: Any) -> None:
    pools = (PoolSettings(instances=(InstanceSettings(id="a", url="http://a:1/"),)),)

    await start_runtime(pools=pools)

    spec = (await store.pool("default").membership()).instances["a"]
    assert (spec.state, spec.url) == (InstanceState.STARTING, "http://a:1")


async def test_a_replica_that_starts_later_leaves_the_members_as_they_are(start_runtime: Any, store: Any) -> None:
    names = ("a", "b")
    pools = (PoolSettings(instances=tuple(InstanceSettings(id=name, url=f"http://{name}:1") for name in names)),)
    await start_runtime(pools=pools)
    await store.pool("default").members.set_instance_state("a", InstanceState.READY)
    await store.pool("default").members.remove_instance("b")

    await start_runtime(pools=pools)

    members = (await store.pool("default").membership()).instances
    assert {name: spec.state for name, spec in members.items()} == {"a": InstanceState.READY}


async def test_the_lease_is_renewed_and_given_up_on_a_clean_exit(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(replica_lease_s=6.0)
    await clock.advance(20.0)
    pool = store.pool("default")
    assert not await pool.upkeep.expired_replicas()
    assert [replica.replica_id for replica in (await pool.snapshot()).replicas] == ["replica-1"]

    await runtime.stop()

    assert (await pool.snapshot()).replicas == ()


async def test_a_store_that_came_back_empty_is_given_members_and_live_requests_again(
    start_runtime: Any, store: Any, clock: Any, scheduling: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b", state=InstanceState.DRAINING)))
    dispatched = await runtime.intake.place(tools.request("x" * 400))
    answering = await runtime.intake.place(tools.request("y" * 400))
    answering.first_token()
    await clock.advance(2.0)
    emptied = MemoryStore(scheduling, now_ms=clock.now_ms)
    swap_store(runtime, emptied)

    await clock.advance(3.0)

    snapshot = await emptied.pool("default").snapshot()
    assert {name: spec.state for name, spec in snapshot.instances.items()} == {"a": "ready", "b": "draining"}
    assert {record.request_id: record.state for record in snapshot.requests} == {
        dispatched.request_id: RequestState.DISPATCHED,
        answering.request_id: RequestState.PREFILLED,
    }
    assert snapshot.loads["a"].pending_tokens == 100
    for request in (dispatched, answering):
        request.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await emptied.pool("default").snapshot()).requests == ()


async def test_an_instance_removed_on_purpose_does_not_come_back(start_runtime: Any, store: Any, clock: Any) -> None:
    await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    pool = store.pool("default")
    await pool.members.remove_instance("b")
    await pool.retire("replica-1")  # the next heartbeat finds itself unknown

    await clock.advance(5.0)

    assert set((await pool.membership()).instances) == {"a"}


async def test_a_heartbeat_under_way_says_nothing_of_the_store(start_runtime: Any, clock: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"),), through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0]
    )
    states: list[str] = []

    async def looks(*_: Any) -> None:
        states.append(runtime.replicas["default"].store_state)

    tampered[0].before["heartbeat"] = looks
    await clock.advance(5.0)

    assert set(states) == {"ok"}


async def test_a_leftover_is_released_at_the_first_look(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    pool = store.pool("default")
    mine = await runtime.intake.place(tools.request())
    for replica_id in ("replica-1", "replica-2"):
        await pool.place(tools.placement(f"of {replica_id}", replica_id=replica_id))

    await clock.advance(31.0)

    left = {record.request_id for record in (await pool.snapshot()).requests}
    assert left == {mine.request_id, "of replica-2"}
    assert runtime.context.metrics.registry.get_sample_value("dualmap_reconciled_requests_total") == 1.0
    mine.finish(Outcome.COMPLETED)


async def test_a_request_that_ends_while_leftovers_are_looked_for_is_none(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    ending = await runtime.intake.place(tools.request())

    async def ends(*_: Any, **__: Any) -> None:
        ending.finish(Outcome.COMPLETED)
        await tools.settle()

    tampered.after["requests_of"] = ends
    await clock.advance(31.0)

    assert (await store.pool("default").snapshot()).requests == ()
    assert runtime.context.metrics.registry.get_sample_value("dualmap_reconciled_requests_total") == 0.0


async def test_what_a_killed_process_of_the_same_id_left_is_released_before_the_first_beat(
    start_runtime: Any, store: Any
) -> None:
    pool, tampered = store.pool("default"), tools.Tampered(store)
    await pool.members.put_instance(tools.spec("a"))
    await pool.heartbeat("replica-1", 60_000, {})
    for replica_id in ("replica-1", "replica-2"):
        await pool.place(tools.placement(f"of {replica_id}", replica_id=replica_id))

    await start_runtime(through=lambda _: tampered)

    assert [record.request_id for record in (await pool.snapshot()).requests] == ["of replica-2"]
    assert tampered.calls.index("release") < tampered.calls.index("heartbeat")


async def test_a_store_that_forgot_the_lease_is_told_at_once_what_is_over(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    pool = store.pool("default")
    mine = await runtime.intake.place(tools.request())
    await pool.place(tools.placement("over"))
    await pool.retire("replica-1")  # as a snapshot from before the first beat

    await clock.advance(3.0)

    assert [record.request_id for record in (await pool.snapshot()).requests] == [mine.request_id]
    mine.finish(Outcome.COMPLETED)


async def test_a_request_that_ends_while_it_is_entered_again_leaves_nothing(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    request = await runtime.intake.place(tools.request())
    await finish(store.pool("default"), request.request_id)
    await store.pool("default").retire("replica-1")

    async def ends_first(*_: Any) -> None:
        request.finish(Outcome.COMPLETED)
        await tools.settle()

    tampered.before["adopt"] = ends_first
    await clock.advance(3.0)

    assert "adopt" in tampered.calls
    assert (await store.pool("default").snapshot()).requests == ()


async def test_what_is_just_being_placed_is_not_taken_for_over(start_runtime: Any, store: Any, clock: Any) -> None:
    tampered, answered = tools.Tampered(store), asyncio.Event()
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    pool = store.pool("default")

    async def answer_is_slow(placement: Any) -> None:
        await answered.wait()

    tampered.after["place"] = answer_is_slow
    placing = asyncio.create_task(runtime.intake.place(tools.request("x" * 400)))
    await tools.settle()
    await pool.retire("replica-1")

    await clock.advance(3.0)

    assert "requests_of" in tampered.calls
    answered.set()
    request = await placing
    assert (await pool.records([request.request_id]))[request.request_id].state is RequestState.DISPATCHED
    request.finish(Outcome.COMPLETED)


async def test_what_was_placed_while_the_leftovers_were_read_stays(start_runtime: Any, store: Any, clock: Any) -> None:
    tampered, placed = tools.Tampered(store), list[Any]()
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    pool = store.pool("default")

    async def meanwhile(*_: Any) -> None:
        placed.append(await runtime.intake.place(tools.request("x" * 400)))

    tampered.before["requests_of"] = meanwhile
    tampered.after["requests_of"] = meanwhile
    await pool.retire("replica-1")
    await clock.advance(3.0)

    assert set(await pool.records([request.request_id for request in placed])) == {
        request.request_id for request in placed
    }
    assert len(placed) == 2
    for request in placed:
        request.finish(Outcome.COMPLETED)


async def test_a_held_request_that_was_moved_or_granted_meanwhile_is_left_as_the_store_has_it(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    """The store is given back nothing that it never lost."""
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)
    long, pool = "word " * 1000, store.pool("default")
    filling = [await runtime.intake.place(tools.request(f"{number} {long}")) for number in range(2)]
    placing = asyncio.create_task(runtime.intake.place(tools.request(long, request_id="held")))
    await tools.settle()
    held = (await pool.records(["held"]))["held"]
    lease = await pool.leader_lease.acquire("leader", 60_000)
    await pool.queues.migrate(held, held.alternative_id, reason="test", fence=lease.fence)
    await pool.retire("replica-1")

    await clock.advance(3.0)

    assert "requests_of" in tampered.calls
    assert (await pool.records(["held"]))["held"].instance_id == held.alternative_id
    for request in filling:
        request.finish(Outcome.COMPLETED)
    moved = await asyncio.wait_for(placing, 60)
    assert moved.machine.instance_id == held.alternative_id
    moved.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await pool.snapshot()).requests == ()


async def test_what_an_older_snapshot_of_the_store_has_in_another_place_is_put_right(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    """It was sent to b after the snapshot in which it was held for a."""
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    pool = store.pool("default")
    request = await runtime.intake.place(tools.request("x" * 4000))
    other = "b" if request.machine.instance_id == "a" else "a"
    await finish(pool, request.request_id)
    await pool.place(tools.placement("filler", other, 1200, replica_id="replica-2"))
    await pool.place(tools.placement(request.request_id, other, 1000))
    assert (await pool.records([request.request_id]))[request.request_id].state is RequestState.HELD
    await pool.retire("replica-1")

    await clock.advance(3.0)

    record = (await pool.records([request.request_id]))[request.request_id]
    assert (record.state, record.instance_id) == (RequestState.DISPATCHED, request.machine.instance_id)
    loads = await pool.loads()
    assert (loads[request.machine.instance_id].pending_tokens, loads[other].pending_tokens) == (1000, 1200)
    request.finish(Outcome.COMPLETED)


async def test_what_could_not_be_given_back_is_tried_again_at_every_beat(
    start_runtime: Any, store: Any, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    pool = store.pool("default")
    request = await runtime.intake.place(tools.request("x" * 400))
    await finish(pool, request.request_id)
    await pool.retire("replica-1")

    async def away(*_: Any) -> None:
        raise StoreUnavailableError("it went again")

    tampered.before["snapshot"] = away
    await clock.advance(5.0)
    assert "could not be restored" in caplog.text
    assert (await pool.snapshot()).loads["a"].pending_tokens == 0
    del tampered.before["snapshot"]
    await clock.advance(5.0)

    assert (await pool.snapshot()).loads["a"].pending_tokens == 100
    assert tampered.calls.count("adopt") == 1, "given back once is enough"
    request.finish(Outcome.COMPLETED)


async def test_a_leftover_of_a_replica_on_its_own_is_released_by_its_own_state(
    start_runtime: Any, clock: Any, scheduling: Any
) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"),),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )
    pool = runtime.pools.pools["default"].store

    async def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("away")

    calls = ("place", "snapshot", "membership", "heartbeat", "release", "requests_of", "records")
    tampered[0].before |= dict.fromkeys(calls, away)
    await pool.place(tools.placement("lost"))
    assert pool.degraded
    assert "lost" in await pool.records(["lost"])

    await clock.advance(61.0)

    assert await pool.records(["lost"]) == {}


async def test_a_replica_warns_of_those_that_schedule_by_other_settings(
    start_runtime: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = store.pool("default")
    for replica_id, lease_ms in (("other-fleet", 60_000), ("dead", 0)):
        await pool.heartbeat(replica_id, lease_ms, {"scheduling": "00000000"})
    await pool.heartbeat("unknown", 60_000, {})

    await start_runtime()
    await start_runtime()

    warnings = [record.getMessage() for record in caplog.records if "settings" in record.getMessage()]
    assert [warning.partition(" in use by ")[2].partition(":")[0] for warning in warnings] == ["other-fleet"] * 2


async def test_a_pool_that_a_newer_version_uses_is_not_joined_and_not_written(start_runtime: Any, store: Any) -> None:
    meta = PoolKeys("dualmap", "default").meta
    store.server.run(b"HSET", meta, b"schema", SCHEMA + 1, b"oldest_schema", SCHEMA + 1)
    pools = (PoolSettings(instances=(InstanceSettings(id="a", url="http://a:1/"),)),)

    with pytest.raises(StoreSchemaError, match="run the newer version here too"):
        await start_runtime(pools=pools)

    assert [*store.server.contents] == [meta]
