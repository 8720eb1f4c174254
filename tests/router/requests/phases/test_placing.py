"""Placing: on a real Valkey, by several replicas at once; and what it costs in store calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dualmap.router.errors import RouterError, SloUnreachableError
from dualmap.router.replica.runtime import Runtime
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.placing.decision import Reason
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.queues.leader_jobs import sweep_queue
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.steps import drive
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.settings import StoreSettings
from tests.router import tools

FLAGS = SchedulingSettings(policy="dualmap", block_tokens=16)
HASTE = SchedulingSettings(slo_ttft_s=0.005, max_deferred_s=0.002, block_tokens=16)
StartReplica = Callable[..., Awaitable[Runtime]]


@pytest.fixture
async def start_replica(valkey_url: str) -> AsyncIterator[StartReplica]:
    """Replicas on one Valkey, in real time. Their calls share a connection each, as in every router: the release of a
    request that is cancelled must not overtake its reservation."""
    started: list[tuple[Runtime, Store]] = []

    async def start(scheduling: SchedulingSettings = FLAGS, **settings: Any) -> Runtime:
        store = await open_store(StoreSettings(url=valkey_url), scheduling=scheduling)
        runtime = Runtime(RouterSettings(**settings), scheduling, store, [PoolSettings()])
        await runtime.start()
        started.append((runtime, store))
        return runtime

    yield start
    for runtime, store in started:
        await runtime.stop()
        await store.close()


async def live_through(runtime: Runtime, rng: random.Random, outcomes: Counter[str]) -> None:
    """One request with a fate of its own: it may be cancelled, fail over, end early or be refused."""
    prompt = f"{rng.randrange(5)} " + "word " * rng.randrange(1, 800)
    try:
        request = await runtime.intake.place(tools.request(prompt, stream=rng.random() < 0.8))
        try:
            if rng.random() < 0.2:
                await request.failed(Failed(InstanceFailure(FailureKind.CONNECT)))
            await asyncio.sleep(rng.random() * 0.005)
            if rng.random() < 0.9:
                request.first_token()
            await asyncio.sleep(rng.random() * 0.005)
        finally:
            request.finish(rng.choice([Outcome.COMPLETED, Outcome.CLIENT_GONE, Outcome.UPSTREAM_FAILED]))
        outcomes["placed"] += 1
    except RouterError as error:
        outcomes[error.code] += 1
    except asyncio.CancelledError:
        outcomes["cancelled"] += 1


async def sweep(pool: Any, order: QueueOrder) -> None:
    """Do what the leader's sweeper does, more often."""
    while True:
        for name, load in (await pool.loads()).items():
            if load.queued_requests:
                await drive(sweep_queue(name, order), pool)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("scheduling", [FLAGS, HASTE], ids=["dualmap, fifo", "least cost, deadlines that few can meet"])
async def test_whatever_becomes_of_requests_nothing_is_left_of_them(
    start_replica: StartReplica, scheduling: SchedulingSettings
) -> None:
    replicas = [await start_replica(scheduling) for _ in range(3)]
    for replica in replicas:
        tools.break_after(replica, faults=1000)
        replica.pools.pools["default"].evidence.retries = RetryBudget(1.0, 1000.0, 0.0)
    pool = replicas[0].pools.pools["default"].store
    for name in "abcd":
        await pool.members.put_instance(
            tools.spec(name, prefill_tokens_per_s=1e5, max_running_requests=1, max_queued_requests=20)
        )
    sweeping = asyncio.create_task(sweep(pool, queue_order_of(scheduling)))
    rng, outcomes = random.Random(7), Counter[str]()

    tasks = []
    for number in range(400):
        task = asyncio.create_task(live_through(replicas[number % 3], rng, outcomes))
        tasks.append(task)
        if rng.random() < 0.1:
            asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
        await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)

    sweeping.cancel()
    for replica in replicas:
        await replica.pools.pools["default"].outbox.flush()
        assert len(replica.context.live) == 0
    snapshot = await pool.snapshot()
    assert snapshot.requests == ()
    for load in snapshot.loads.values():
        assert (load.pending_tokens, load.dispatched_tokens, load.queued_requests, load.running_requests) == (0,) * 4
    assert outcomes["placed"] > 200
    assert sum(outcomes.values()) + sum(task.cancelled() for task in tasks) == 400


ONE_TRIP_EACH = {"1": 16.0, "more": 0.0}


def trips(runtime: Runtime) -> dict[str, float | None]:
    """Requests placed, by round trips to the store."""
    registry = runtime.context.metrics.registry
    return {
        count: registry.get_sample_value("dualmap_placements_total", {"pool": "default", "round_trips": count})
        for count in ("1", "more")
    }


async def test_a_placement_names_two_instances_in_one_round_trip_however_large_the_fleet_is(
    start_runtime: Any, store: Any
) -> None:
    named: list[int] = []
    tampered = tools.Tampered(store)
    runtime = await start_runtime(
        instances=tuple(tools.spec(f"i{number:03}") for number in range(200)), through=lambda _: tampered
    )

    async def count(placement: Any) -> None:
        named.append(len(placement.weighing.instances))

    tampered.before["place"] = count
    tampered.calls.clear()
    request = await runtime.intake.place(tools.request("x" * 4000))

    assert named == [2]
    assert tampered.calls == ["place"]
    request.finish(Outcome.COMPLETED)
    assert trips(runtime) == {"1": 1.0, "more": 0.0}


@pytest.mark.parametrize("scheduling", [SchedulingSettings(block_tokens=16)])
async def test_in_a_large_fleet_too_an_instance_beyond_the_pair_costs_no_second_trip(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(f"i{number:03}") for number in range(20)))

    requests = [await runtime.intake.place(tools.request(f"{number} " + "x" * 4000)) for number in range(20)]

    for request in requests:
        request.sent()

    assert trips(runtime) == {"1": 20, "more": 0.0}
    assert len({request.machine.instance_id for request in requests}) == 20
    assert any(request.explain().rounds[-1].decision.reason is Reason.BEYOND_PAIR for request in requests)
    for request in requests:
        request.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [SchedulingSettings(policy="min-ttft", block_tokens=16)])
async def test_a_policy_that_chooses_observes_first_and_chooses_again_what_was_stale_twice(
    start_runtime: Any, store: Any
) -> None:
    tampered, checked = tools.Tampered(store), list[int | None]()
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)

    async def meanwhile(placement: Any) -> None:
        """More than a dispatch window is placed where the choice fell."""
        checked.append(placement.max_pending_tokens)
        name = f"meanwhile {len(checked)}"
        await store.pool("default").place(tools.placement(name, placement.weighing.instances[0], tokens=2000))

    tampered.before["place"] = meanwhile
    tampered.calls.clear()
    placing = asyncio.create_task(runtime.intake.place(tools.request("x" * 400)))
    await tools.settle()

    assert tampered.calls[:6] == ["observe", "place"] * 3
    assert [most is None for most in checked] == [False, False, True]
    assert (
        runtime.context.metrics.registry.get_sample_value("dualmap_stale_reservations_total", {"pool": "default"})
        == 2.0
    )
    assert trips(runtime) == {"1": 0.0, "more": 1.0}
    placing.cancel()


@pytest.mark.parametrize(
    ("scheduling", "held"),
    [
        (SchedulingSettings(policy="dualmap", block_tokens=16), 2),
        (SchedulingSettings(policy="preble", block_tokens=16), 0),
        (SchedulingSettings(policy="preble", queue_order="deadline", block_tokens=16), 2),
        (SchedulingSettings(queue_order="fifo", block_tokens=16), 0),
    ],
    ids=["may move", "neither", "may be reordered", "the default policy, neither"],
)
async def test_only_what_may_be_reordered_or_moved_waits_for_the_dispatch_window(
    start_runtime: Any, store: Any, held: int
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", dispatch_window_tokens=16, prefill_tokens_per_s=100.0),))

    placing = [asyncio.create_task(runtime.intake.place(tools.request(f"{n}" * 1600))) for n in range(3)]
    await tools.settle()

    assert (await store.pool("default").loads())["a"].queued_requests == held
    for task in placing:
        task.cancel()


async def test_requests_of_one_prefix_meet_on_two_instances_whatever_the_replica(start_replica: StartReplica) -> None:
    replicas = [await start_replica() for _ in range(2)]
    pool = replicas[0].pools.pools["default"].store
    for number in range(8):
        await pool.members.put_instance(tools.spec(f"i{number}", prefill_tokens_per_s=1e6))

    taken: set[str] = set()
    for number in range(20):
        request = await replicas[number % 2].intake.place(tools.request("the same system prompt " * 20 + str(number)))
        taken.add(request.machine.instance_id)
        request.first_token()
        request.finish(Outcome.COMPLETED)

    assert len(taken) <= 2


async def test_a_burst_is_spread_as_every_placement_weighs_the_counts_of_its_moment(
    start_replica: StartReplica,
) -> None:
    """All of them arrive before any is answered: who decided on counts that a reply told would send them to one."""
    replicas = [await start_replica(SchedulingSettings(policy="dualmap", block_tokens=16)) for _ in range(2)]
    pool = replicas[0].pools.pools["default"].store
    for name in "ab":
        await pool.members.put_instance(tools.spec(name))

    async def place(number: int) -> None:
        request = await replicas[number % 2].intake.place(tools.request(f"{number} " + "word " * 8000))
        request.sent()

    burst = [asyncio.create_task(place(number)) for number in range(32)]
    snapshot = await pool.snapshot()
    async with asyncio.timeout(60):
        while len(snapshot.requests) < 32 or [trips(replica) for replica in replicas] != [ONE_TRIP_EACH] * 2:
            snapshot = await pool.snapshot()

    placed = Counter(request.instance_id for request in snapshot.requests)
    assert abs(placed["a"] - placed["b"]) <= 2, placed
    for task in burst:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)


async def test_where_late_requests_are_refused_one_that_cannot_be_on_time_is_refused_and_not_reserved(
    start_runtime: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), late_requests="refuse")
    for instance_id in "ab":
        await store.pool("default").place(tools.placement(f"work of {instance_id}", instance_id, tokens=3000))

    with pytest.raises(SloUnreachableError, match=r"expected after 3\.\d s, past the target of 2 s") as refused:
        await runtime.intake.place(tools.request("x" * 400, slo_s=2.0))
    taken = asyncio.create_task(runtime.intake.place(tools.request("x" * 400, slo_s=4.0)))
    await tools.settle()

    assert refused.value.retry_after_s == pytest.approx(3.0)
    assert len((await store.pool("default").snapshot()).requests) == 3
    assert refused.value.request_id is not None
    assert runtime.context.decisions.get(refused.value.request_id).rounds[-1].status is PlaceStatus.MISSED
    taken.cancel()


async def test_a_retry_is_served_however_late(start_runtime: Any, store: Any) -> None:
    """Its client was let in, and has lost an instance already."""
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), late_requests="refuse")
    request = await runtime.intake.place(tools.request("x" * 400, slo_s=2.0))
    other = "b" if request.machine.instance_id == "a" else "a"
    await store.pool("default").place(tools.placement("work", other, tokens=3000))

    retry = asyncio.create_task(request.failed(Failed(InstanceFailure(FailureKind.CONNECT))))
    await tools.settle()

    assert not retry.done()
    assert (await store.pool("default").records([request.request_id]))[request.request_id].instance_id == other
    retry.cancel()


async def test_what_is_not_reserved_yet_is_not_entered_again(start_runtime: Any, store: Any) -> None:
    tampered, told = tools.Tampered(store), list[Any]()
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)

    async def on_the_way(placement: Any) -> None:
        told.extend(record for live in runtime.context.live for record in live.records(0))

    tampered.before["place"] = on_the_way
    request = await runtime.intake.place(tools.request())

    assert told == []
    request.finish(Outcome.COMPLETED)


async def test_what_left_its_instance_is_not_entered_there_again(start_runtime: Any, store: Any) -> None:
    """A retry that has not been placed is nowhere, least of all where it failed."""
    tampered, told = tools.Tampered(store), list[Any]()
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)
    request = await runtime.intake.place(tools.request())

    async def on_the_way(*_: Any, **__: Any) -> None:
        told.extend(record for live in runtime.context.live for record in live.records(0))

    tampered.before |= {"place": on_the_way, "release": on_the_way}
    await request.failed(Failed(InstanceFailure(FailureKind.CONNECT)))

    assert told == []
    assert request.records(0)[0].instance_id == request.machine.instance_id
    request.finish(Outcome.COMPLETED)
