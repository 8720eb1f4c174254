"""Placement where nothing is left to weigh: one call of the store, and as good as two in every way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from router.errors import StoreAwayError
from router.outcome import FailureKind, InstanceFailure, Outcome
from scheduling.decision import Reason
from scheduling.settings import SchedulingSettings
from statestore.base import RequestState
from statestore.errors import StoreUnavailableError
from statestore.last_seen import UnreadLoads
from statestore.reservation import ReserveStatus

PROMPT = "one prefix " * 400
"""About 1100 tokens."""


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(block_tokens=16, virtual_nodes=16, policy="dualmap-wide")


@pytest.fixture
async def started(start_runtime: Any, tools: Any) -> tuple[Any, Any]:
    """A replica over two instances, and what it asks of the store."""
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"), tools.spec("b")),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )
    tampered[0].calls.clear()
    return runtime, tampered[0]


async def nothing_is_left(store: Any, runtime: Any) -> bool:
    await runtime.context.outbox.flush(5.0)
    snapshot = await store.pool("default").snapshot()
    idle = all(load.pending_tokens == load.running_requests == 0 for load in snapshot.loads.values())
    return idle and not snapshot.requests and len(runtime.context.live) == 0


async def test_an_idle_fleet_is_asked_once_and_the_story_is_told_in_full(started: Any, store: Any, tools: Any) -> None:
    runtime, tampered = started

    request = await runtime.lifecycle.place(tools.request(PROMPT, request_id="mine"))

    assert tampered.calls == ["reserve_idle"]
    (record,) = (await store.pool("default").snapshot()).requests
    assert (record.request_id, record.instance_id, record.state) == (
        "mine", request.instance_id, RequestState.DISPATCHED,
    )  # fmt: skip
    assert request.expected_ttft_s is not None
    (told,) = request.explain().rounds
    assert (told.status, told.decision.instance_id) == (ReserveStatus.DISPATCHED, request.instance_id)
    assert set(told.loads) == {"a", "b"}
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_the_story_tells_loads_that_nobody_has_read_yet(
    started: Any, store: Any, client_of: Any, tools: Any
) -> None:
    runtime, tampered = started

    async def unread(candidates: Any, newcomer: Any) -> Any:
        seen, placement = await store.pool("default").reserve_idle(candidates, newcomer)
        return replace(seen, loads=UnreadLoads(seen.loads, lambda _, load: load)), placement

    tampered.before["reserve_idle"] = unread
    request = await runtime.lifecycle.place(tools.request(PROMPT, request_id="mine"))
    request.finish(Outcome.COMPLETED)

    story = (await client_of(runtime).get("/admin/explain/mine")).json()

    assert set(story["rounds"][0]["loads"]) == {"a", "b"}
    assert story["rounds"][0]["loads"]["a"]["pending_tokens"] == 0


async def test_the_next_of_the_same_prefix_goes_where_the_first_one_went(started: Any, store: Any, tools: Any) -> None:
    runtime, tampered = started
    first = await runtime.lifecycle.place(tools.request(PROMPT))
    first.finish(Outcome.COMPLETED)
    await runtime.context.outbox.flush(5.0)
    tampered.calls.clear()

    second = await runtime.lifecycle.place(tools.request(f"{PROMPT} and more"))

    assert tampered.calls == ["reserve_idle"]
    assert second.instance_id == first.instance_id
    assert second.rounds[-1].decision.reason is Reason.CACHE
    assert second.expected_cached_tokens > 1000


async def test_candidates_that_were_busy_are_only_looked_at_until_a_look_finds_one_idle(
    started: Any, store: Any, tools: Any
) -> None:
    runtime, tampered = started
    running = [await runtime.lifecycle.place(tools.request(f"{number} {PROMPT}")) for number in range(2)]
    assert {request.instance_id for request in running} == {"a", "b"}

    async def asked() -> list[str]:
        tampered.calls.clear()
        request = await runtime.lifecycle.place(tools.request("a third prompt"))
        calls = [call for call in tampered.calls if call != "finish"]
        request.finish(Outcome.CLIENT_GONE)
        await runtime.context.outbox.flush(5.0)
        return calls

    assert await asked() == ["reserve_idle", "reserve"], "both turn out to be busy"
    assert await asked() == ["observe", "reserve"]
    for request in running:
        request.finish(Outcome.COMPLETED)
    await runtime.context.outbox.flush(5.0)
    assert await asked() == ["observe", "reserve"], "which finds them idle"
    assert await asked() == ["reserve_idle"]


async def test_who_leaves_while_the_store_is_asked_leaves_nothing(started: Any, store: Any, tools: Any) -> None:
    runtime, tampered = started
    reserved, for_ever = asyncio.Event(), asyncio.Event()

    async def hang(*_: Any) -> None:
        reserved.set()
        await for_ever.wait()

    tampered.after["reserve_idle"] = hang
    placing = asyncio.create_task(runtime.lifecycle.place(tools.request(PROMPT)))
    await reserved.wait()
    assert len((await store.pool("default").snapshot()).requests) == 1

    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing

    assert await nothing_is_left(store, runtime)


async def test_what_may_have_been_reserved_is_released_when_the_answer_is_lost(
    started: Any, store: Any, tools: Any
) -> None:
    runtime, tampered = started

    async def answer_lost(*_: Any) -> None:
        raise StoreUnavailableError("the answer was lost")

    tampered.after["reserve_idle"] = answer_lost

    with pytest.raises(StoreAwayError):
        await runtime.lifecycle.place(tools.request(PROMPT))

    assert await nothing_is_left(store, runtime)


async def test_an_id_that_is_live_on_another_replica_gets_a_suffix(
    start_runtime: Any, started: Any, store: Any, tools: Any
) -> None:
    runtime, _ = started
    other = await start_runtime()
    first = await other.lifecycle.place(tools.request("another prompt", request_id="mine"))

    second = await runtime.lifecycle.place(tools.request(PROMPT, request_id="mine"))

    assert second.request_id.startswith("mine-")
    assert {record.request_id for record in (await store.pool("default").snapshot()).requests} == {
        "mine", second.request_id,
    }  # fmt: skip
    for request, replica in ((first, other), (second, runtime)):
        request.finish(Outcome.COMPLETED)
        await replica.context.outbox.flush(5.0)
    assert await nothing_is_left(store, runtime)


async def test_a_retry_weighs_what_is_left(started: Any, store: Any, tools: Any) -> None:
    runtime, tampered = started
    request = await runtime.lifecycle.place(tools.request(PROMPT))
    failed = request.instance_id
    tampered.calls.clear()

    await request.reroute(InstanceFailure(FailureKind.CONNECT, "connection refused"))

    assert request.instance_id != failed
    assert "reserve_idle" not in tampered.calls
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)
