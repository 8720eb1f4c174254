"""Placement on a real Valkey, by several replicas at once; and what it costs in store calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from router.errors import QueueFullError, RouterError
from router.outcome import FailureKind, InstanceFailure, Outcome
from router.runtime import Runtime
from router.settings import RouterSettings
from scheduling.settings import SchedulingSettings
from statestore.base import Store
from statestore.connect import open_store
from statestore.reservation import ReserveOutcome, ReserveStatus
from statestore.settings import PoolSettings, StoreSettings

FLAGS = SchedulingSettings(policy="dualmap", block_tokens=16, virtual_nodes=16)
StartReplica = Callable[..., Awaitable[Runtime]]


@pytest.fixture
async def start_replica(valkey_url: str) -> AsyncIterator[StartReplica]:
    """Replicas on one Valkey, in real time."""
    started: list[tuple[Runtime, Store]] = []

    async def start(scheduling: SchedulingSettings = FLAGS, **settings: Any) -> Runtime:
        store = await open_store(StoreSettings(url=valkey_url), scheduling=scheduling)
        runtime = Runtime(RouterSettings(held_poll_s=0.2, **settings), scheduling, store, [PoolSettings()])
        await runtime.start()
        started.append((runtime, store))
        return runtime

    yield start
    for runtime, store in started:
        await runtime.stop()
        await store.close()


async def live_through(runtime: Runtime, tools: Any, rng: random.Random, outcomes: Counter[str]) -> None:
    """One request with a fate of its own: it may be cancelled, fail over, end early or be refused."""
    prompt = f"{rng.randrange(5)} " + "word " * rng.randrange(1, 800)
    try:
        request = await runtime.lifecycle.place(tools.request(prompt, stream=rng.random() < 0.8))
        try:
            if rng.random() < 0.2:
                await request.reroute(InstanceFailure(FailureKind.CONNECT))
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


async def test_whatever_becomes_of_requests_nothing_is_left_of_them(start_replica: StartReplica, tools: Any) -> None:
    replicas = [await start_replica(breaker_fault_limit=1000, retry_budget_per_s=1000.0) for _ in range(3)]
    pool = replicas[0].pools.pools["default"].store
    for name in "abcd":
        await pool.put_instance(tools.spec(name, prefill_tokens_per_s=1e6, max_queued_requests=20))
    rng, outcomes = random.Random(7), Counter[str]()

    tasks = []
    for number in range(400):
        task = asyncio.create_task(live_through(replicas[number % 3], tools, rng, outcomes))
        tasks.append(task)
        if rng.random() < 0.1:
            asyncio.get_running_loop().call_later(rng.random() * 0.02, task.cancel)
        await asyncio.sleep(0.001)
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)

    for replica in replicas:
        assert await replica.context.outbox.flush(5.0)
        assert len(replica.context.live) == 0
    snapshot = await pool.snapshot()
    assert snapshot.requests == ()
    for load in snapshot.loads.values():
        assert (load.pending_tokens, load.dispatched_tokens, load.queued_requests, load.running_requests) == (0,) * 4
    assert outcomes["placed"] > 200
    assert sum(outcomes.values()) + sum(task.cancelled() for task in tasks) == 400


async def test_the_method_asks_for_two_loads_however_large_the_fleet_is(start_runtime: Any, tools: Any) -> None:
    asked: list[int] = []
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=tuple(tools.spec(f"i{number:03}") for number in range(200)),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )

    async def count(instance_ids: Any, chain: Any, *, horizon: bool) -> None:
        asked.append(len(instance_ids))

    tampered[0].before["observe"] = count
    tampered[0].calls.clear()
    request = await runtime.lifecycle.place(tools.request("x" * 4000))
    request.finish(Outcome.COMPLETED)

    assert asked == [2]
    assert tampered[0].calls == ["observe", "reserve"]


async def test_requests_of_one_prefix_meet_on_two_instances_whatever_the_replica(
    start_replica: StartReplica, tools: Any
) -> None:
    replicas = [await start_replica() for _ in range(2)]
    pool = replicas[0].pools.pools["default"].store
    for number in range(8):
        await pool.put_instance(tools.spec(f"i{number}", prefill_tokens_per_s=1e6))

    taken: set[str] = set()
    for number in range(20):
        request = await replicas[number % 2].lifecycle.place(
            tools.request("the same system prompt " * 20 + str(number))
        )
        taken.add(request.instance_id)
        request.first_token()
        request.finish(Outcome.COMPLETED)

    assert len(taken) <= 2


async def test_a_burst_is_spread_as_if_its_requests_came_one_by_one(start_replica: StartReplica, tools: Any) -> None:
    replica = await start_replica(SchedulingSettings(policy="dualmap", block_tokens=16))
    pool = replica.pools.pools["default"].store
    replica.pools.pools["default"].placement_limiter.max_wait_s = 60.0  # however busy the machine is
    for name in "abcd":
        await pool.put_instance(tools.spec(name))

    async def place(number: int) -> None:
        await replica.lifecycle.place(tools.request(f"{number} " + "word " * 8000))

    for number in range(3):
        await place(number)  # one instance has nothing to do, and all of a burst may want it
    burst = [asyncio.create_task(place(number)) for number in range(3, 32)]

    snapshot = await pool.snapshot()
    async with asyncio.timeout(20):
        while len(snapshot.requests) < 32:
            snapshot = await pool.snapshot()
    held = Counter(request.instance_id for request in snapshot.requests)
    assert max(held.values()) - min(held.values()) <= 2, held
    for task in burst:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)


async def test_all_rounds_of_a_refused_request_share_one_wait_for_slots(start_runtime: Any, tools: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=tuple(tools.spec(name, max_queued_requests=0) for name in "abcd"),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )
    pool = runtime.pools.pools["default"]
    for name in "abcd":  # every instance has as much as it takes, and queues nothing
        await runtime.lifecycle.place(tools.request(name * 8000))
    pool.placement_limiter.try_acquire(10_000)  # somebody looks for ever

    refused = asyncio.create_task(runtime.lifecycle.place(tools.request("x" * 8000)))
    await runtime.context.clock.advance(pool.placement_limiter.max_wait_s)

    with pytest.raises(QueueFullError):
        await refused


async def test_what_was_never_reserved_is_not_entered_anew(start_runtime: Any, tools: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"), tools.spec("b")),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )
    seen: list[Any] = []

    async def between_rounds(*_: Any, **__: Any) -> None:
        seen.append([live.record(0) for live in runtime.context.live])

    async def stale_at_first(reservation: Any) -> Any:
        return ReserveOutcome(ReserveStatus.STALE) if len(seen) == 1 else None

    tampered[0].before.update(observe=between_rounds, reserve=stale_at_first)
    request = await runtime.lifecycle.place(tools.request())

    assert seen == [[None], [None]]
    request.finish(Outcome.COMPLETED)
