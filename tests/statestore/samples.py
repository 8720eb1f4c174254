"""Requests, placements, instances and chains that the store's tests speak of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from typing import Any, Protocol

import xxhash

from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import Placement, PlaceReply
from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, grant_queue
from dualmap.scheduling.queues.leader_jobs import sweep_queue
from dualmap.scheduling.queues.queue_order import QueueHead, QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import drive
from dualmap.scheduling.tenants.budgets import Draw, Draws, drawn_text
from dualmap.statestore.call_values import Transition
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.records import INSTANCE
from tests.support.placements import QUEUED, WEIGHED, changed

BLOCK_TOKENS = 100
SCHEDULING = SchedulingSettings(policy="dualmap", queue_order="fifo")
DEADLINE = SchedulingSettings(max_deferred_s=30.0)
FIRST = Weights(Form(), PLAIN_TTFT)
"""The first named instance that takes requests."""
LEAST_TTFT = Weights(PLAIN_TTFT, PLAIN_TTFT)


class HandClock:
    """The store's time, moved by hand."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms


def chain(*hashes: int, prompt_tokens: int | None = None) -> Chain:
    return Chain(hashes, BLOCK_TOKENS, prompt_tokens or BLOCK_TOKENS * len(hashes))


CHAIN = chain(11, 12, 13, 14)


def instance(instance_id: str, **changes: Any) -> InstanceSpec:
    """A ready instance with room for two requests of 400 uncached tokens."""
    spec = InstanceSpec(
        instance_id,
        f"http://{instance_id}:8000",
        state=InstanceState.READY,
        dispatch_window_tokens=800,
        max_running_requests=8,
        max_queued_requests=4,
    )
    return replace(spec, **changes)


def own_chain(request_id: str, prompt_tokens: int) -> Chain:
    """A prompt that no other request shares a block with."""
    blocks = max(1, prompt_tokens // BLOCK_TOKENS)
    hashes = [xxhash.xxh64_intdigest(f"{request_id} {block}".encode()) for block in range(blocks)]
    return Chain(tuple(hashes), BLOCK_TOKENS, prompt_tokens)


_PLACEMENT_FIELDS = (*WEIGHED, *QUEUED, *(each.name for each in fields(Placement)))


def placement(request_id: str, *instances: str, tokens: int = 400, **changes: Any) -> Placement:
    """A new request of replica ``one``, to the first of the instances (``a``); ``changes`` are fields of the placement
    or of its request."""
    request_chain = changes.pop("chain", None) or own_chain(request_id, tokens)
    of_placement = {name: changes.pop(name) for name in _PLACEMENT_FIELDS if name in changes}
    request = StoredRequest(
        request_id,
        replica_id="one",
        instance_id="",
        state=RequestState.HELD,
        attempt=1,
        uncached_tokens=0,
        prompt_tokens=request_chain.prompt_tokens,
        expected_output_tokens=50,
        slo_ms=5000,
    )
    named = instances or ("a",)
    placed = Placement(replace(request, **changes), request_chain, Weighing(Leg.WHOLE, named, FIRST))
    return changed(placed, **of_placement)


async def place(pool: PoolStore, request_id: str, *instances: str, **changes: Any) -> PlaceReply:
    return await pool.place(placement(request_id, *instances, **changes))


async def place_drawing(pool: PoolStore, request_id: str, *draws: Draw, must_draw: bool = False) -> PlaceReply:
    """Place a request of tenant ``acme`` that draws from its budgets."""
    together = Draws.of(*draws)
    about = {"tenant": "acme", "drawn": drawn_text(together), "draws": together}
    return await place(pool, request_id, tokens=100, must_draw=must_draw, **about)


async def hold(pool: PoolStore, request_id: str, *instances: str, slo_ms: int = 5000, **changes: Any) -> StoredRequest:
    """Place in a queue by deadline; the record."""
    await place(pool, request_id, *instances, slo_ms=slo_ms, rank_ms=slo_ms, defers=True, **changes)
    return await record(pool, request_id)


async def first_token(
    pool: PoolStore, request_id: str, instance_id: str, *, note: str = "", seen: bool = True
) -> Transition:
    """One that was seen, or is presumed."""
    (told,) = await pool.release([Release(request_id, instance_id, note=note, seen=seen)])
    return told


async def finish(pool: PoolStore, request_id: str, **about: Any) -> Transition:
    """``about`` are fields of the release."""
    (told,) = await pool.release([Release(request_id, **about)])
    return told


async def record(pool: PoolStore, request_id: str) -> StoredRequest:
    return (await pool.records([request_id]))[request_id]


class Committing(Protocol):
    async def commit(self, plan: QueuePlan) -> CommitReply: ...


async def grant(pool: Committing, queue: QueueHead | None, scheduling: SchedulingSettings = SCHEDULING) -> int:
    """Plan the queue that a transition replied, as a replica does."""
    return await drive(grant_queue(queue, queue_order_of(scheduling)), pool)


async def sweep(pool: PoolStore, instance_id: str = "a", scheduling: SchedulingSettings = SCHEDULING) -> int:
    """Do what the leader does once a second."""
    return await drive(sweep_queue(instance_id, queue_order_of(scheduling)), pool)


async def lead(pool: PoolStore, lease_ms: int = 3_600_000) -> int:
    """Become leader; the fence."""
    lease = await pool.leader_lease.acquire("worker", lease_ms)
    assert lease is not None
    return lease.fence


async def drift(pool: PoolStore, instance_id: str, count: str, by: int) -> None:
    """Change a count past every transition."""
    assert isinstance(pool, PoolStore)
    key = pool._keys.instance_records
    kept = INSTANCE.fields(await pool._calls.command("HGET", key, instance_id))
    kept[count] += by
    await pool._calls.command("HSET", key, instance_id, INSTANCE.pack([kept[name] for name in INSTANCE.names]))


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Poll to a deadline."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def within(awaitable: Awaitable[Any], within_s: float = 60.0) -> Any:
    async with asyncio.timeout(within_s):
        return await awaitable


async def assert_sums_hold(pool: PoolStore) -> None:
    """Every count of every instance is the sum over its requests."""
    view = await pool.snapshot()
    for instance_id, load in view.loads.items():
        mine = [request for request in view.requests if request.instance_id == instance_id]
        held = [request for request in mine if request.state is RequestState.HELD]
        dispatched = [request for request in mine if request.state is RequestState.DISPATCHED]
        sent = [request for request in mine if request.state is not RequestState.HELD]
        assert load.pending_tokens == sum(request.uncached_tokens for request in (*held, *dispatched))
        assert load.dispatched_tokens == sum(request.uncached_tokens for request in dispatched)
        assert load.deferred_tokens == sum(request.uncached_tokens for request in held if request.deferred)
        assert load.context_tokens == sum(request.context_tokens for request in sent)
        assert (load.queued_requests, load.running_requests) == (len(held), len(sent))
