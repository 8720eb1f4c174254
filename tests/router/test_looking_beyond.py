"""Placement by a policy that looks past its candidates, over queues in order of deadline."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.outcome import Outcome
from scheduling.chain import Chain
from scheduling.decision import Reason
from scheduling.settings import SchedulingSettings
from statestore.reservation import Reservation

NAMES = ("a", "b", "c", "d")
PROMPT = "one prefix " * 400
"""About 1100 tokens."""


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(
        block_tokens=16, virtual_nodes=16, policy="dualmap-wide", queue_order="deadline", max_hold_s=20.0
    )


async def started(start_runtime: Any, tools: Any, **settings: Any) -> tuple[Any, Any]:
    """A replica over four instances, and what it asks of the store."""
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=tuple(tools.spec(name, dispatch_window_tokens=100_000) for name in NAMES),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
        **settings,
    )
    return runtime, tampered[0]


async def make_busy(store: Any, *instance_ids: str) -> None:
    """Twenty seconds of somebody else's work."""
    for instance_id in instance_ids:
        work = Reservation(
            f"work on {instance_id}", "another", instance_id, Chain((7,), 20_000, 20_000), 20_000, 1, 60_000
        )
        await store.pool("default").reserve(work)


async def pair_of_the_prompt(runtime: Any, tools: Any) -> list[str]:
    request = await runtime.lifecycle.place(tools.request(PROMPT))
    pair = request.rounds[-1].candidates
    request.finish(Outcome.CLIENT_GONE)
    await runtime.context.outbox.flush(1.0)
    return list(pair[:2])


async def test_a_request_goes_past_a_busy_pair_to_an_idle_instance(start_runtime: Any, store: Any, tools: Any) -> None:
    runtime, _ = await started(start_runtime, tools)
    pair = await pair_of_the_prompt(runtime, tools)
    await make_busy(store, *pair)

    request = await runtime.lifecycle.place(tools.request(PROMPT))

    assert request.instance_id not in pair
    last = request.rounds[-1]
    assert last.decision.reason is Reason.BEYOND_PAIR
    assert set(last.loads) >= {request.instance_id, *pair}


async def test_the_second_look_is_taken_only_by_requests_that_need_it(
    start_runtime: Any, store: Any, tools: Any
) -> None:
    runtime, tampered = await started(start_runtime, tools)
    pair = await pair_of_the_prompt(runtime, tools)
    tampered.calls.clear()

    await runtime.lifecycle.place(tools.request(PROMPT))
    assert tampered.calls == ["reserve_idle"]

    await make_busy(store, *pair)
    tampered.calls.clear()
    await runtime.lifecycle.place(tools.request(PROMPT))
    assert tampered.calls == ["reserve_idle", "observe", "reserve"]


async def test_a_prefix_is_found_again_outside_its_pair(start_runtime: Any, store: Any, tools: Any) -> None:
    runtime, _ = await started(start_runtime, tools)
    pair = await pair_of_the_prompt(runtime, tools)
    await make_busy(store, *pair)
    strayed = await runtime.lifecycle.place(tools.request(PROMPT))

    again = await runtime.lifecycle.place(tools.request(f"{PROMPT} and more"))

    assert again.instance_id == strayed.instance_id
    assert again.expected_cached_tokens > 1000


async def test_nobody_looks_behind_an_open_breaker(start_runtime: Any, store: Any, clock: Any, tools: Any) -> None:
    runtime, _ = await started(start_runtime, tools, breaker_fault_limit=1)
    pair = await pair_of_the_prompt(runtime, tools)
    await make_busy(store, *pair)
    closed, opened = sorted({*NAMES} - {*pair})
    runtime.pools.pools["default"].breakers.failed(opened, clock.monotonic_s())

    request = await runtime.lifecycle.place(tools.request(PROMPT))

    assert request.instance_id == closed
    assert opened not in request.rounds[-1].loads


async def test_going_past_half_a_pair_is_going_past_the_pair(
    start_runtime: Any, store: Any, clock: Any, tools: Any
) -> None:
    runtime, _ = await started(start_runtime, tools, breaker_fault_limit=1)
    pair = await pair_of_the_prompt(runtime, tools)
    await make_busy(store, *pair)
    runtime.pools.pools["default"].breakers.failed(pair[0], clock.monotonic_s())

    request = await runtime.lifecycle.place(tools.request(PROMPT))

    assert request.instance_id not in pair
    assert request.rounds[-1].decision.reason is Reason.BEYOND_PAIR


async def test_by_default_a_replica_waits_as_long_as_the_store_may_hold(
    start_runtime: Any, store: Any, clock: Any, tools: Any
) -> None:
    """A request that stepped behind is granted after ``max_hold_s``; the replica is still there to hear of it."""
    runtime = await start_runtime(instances=(tools.spec("a"),))
    pool = store.pool("default")
    lease = await pool.acquire_lease("worker", 60_000)
    first = await runtime.lifecycle.place(tools.request(PROMPT))
    waiting = asyncio.create_task(runtime.lifecycle.place(tools.request(f"{PROMPT * 8}late", slo_s=1.0)))
    await tools.settle()
    assert (await pool.snapshot()).requests[1].late

    await clock.advance(20.5)
    assert not waiting.done()
    assert await pool.grant_overdue(fence=lease.fence) == 1
    await tools.settle()

    assert (await waiting).instance_id == "a"
    first.finish(Outcome.COMPLETED)
