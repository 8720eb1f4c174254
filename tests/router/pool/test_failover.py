"""A replica without its store: it goes on, and when the store is back they agree."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from dualmap.router.pool.failover import STEADY_S, FailoverPool
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.scheduling.placing.placement import Observation, PlaceReply, PlaceStatus
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.charge import Charge
from dualmap.scheduling.request.metering import KEPT, used_by
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import RunName, Turn
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.budgets import Budget, Draw, Draws, Limit, Measure, Period, drawn_text, returned
from dualmap.statestore.call_values import Membership, PoolSnapshot, Transition
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import LimitsUnknownError, StoreSchemaError, StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.memory import MemoryStore, wall_clock_ms
from dualmap.statestore.memory.server import MemoryServer
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.allotments import Allotment
from dualmap.statestore.pool.schema import SCHEMA
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.processes import running
from tests.statestore.samples import (
    CHAIN,
    DEADLINE,
    SCHEDULING,
    assert_sums_hold,
    finish,
    first_token,
    grant,
    instance,
    lead,
    place,
    placement,
    until,
    within,
)
from tests.support.ports import free_port
from tests.support.store_servers import binary_of


def failover(primary: Any, scheduling: SchedulingSettings = SCHEDULING, **options: Any) -> FailoverPool:
    return FailoverPool(primary, scheduling, measures=RouterMetrics(["default"]).store_calls, **options)


class Replica:
    """A router's use of its pool, and its knowledge of its own requests."""

    def __init__(self, pool: FailoverPool, scheduling: SchedulingSettings = SCHEDULING) -> None:
        self.pool = pool
        self.live: dict[str, StoredRequest] = {}
        self._scheduling = scheduling
        self.rates: dict[str, float] = {}
        pool.recover_from(lambda now_ms: [*self.live.values()], lambda: self.rates)

    @property
    def degraded(self) -> bool:
        return self.pool.degraded

    async def place(self, request_id: str, *instances: str, **changes: Any) -> PlaceReply:
        asked = placement(request_id, *instances, **changes)
        reply = await self.pool.place(asked)
        if reply.status in (PlaceStatus.DISPATCHED, PlaceStatus.HELD):
            assert reply.chosen.instance_id is not None
            self.live[request_id] = replace(
                asked.request,
                instance_id=reply.chosen.instance_id,
                state=RequestState(reply.status.value),
                uncached_tokens=reply.chosen.uncached_tokens,
                enqueued_ms=reply.enqueued_ms,
                dispatched_ms=reply.seen.now_ms if reply.status is PlaceStatus.DISPATCHED else 0,
            )
        return reply

    async def first_token(self, request_id: str) -> None:
        request = self.live[request_id]
        told = await first_token(self.pool, request_id, request.instance_id)
        self.live[request_id] = replace(request, state=RequestState.PREFILLED, prefilled_ms=request.enqueued_ms + 1)
        await grant(self, told.queue, self._scheduling)

    async def finish(self, request_id: str) -> bool:
        self.live.pop(request_id, None)
        told = await finish(self.pool, request_id, replica_id="one")
        await grant(self, told.queue, self._scheduling)
        return told.done

    async def commit(self, plan: QueuePlan) -> CommitReply:
        reply = await self.pool.commit(plan)
        for told in reply.grants:
            request = self.live[told.request_id]
            self.live[told.request_id] = replace(
                request, state=RequestState.DISPATCHED, uncached_tokens=told.uncached_tokens
            )
        return reply


@pytest.fixture
def server() -> Iterator[EmbeddedValkey]:
    """A server of the test's own, to be killed and started again on its port."""
    with EmbeddedValkey() as running:
        yield running


@pytest.fixture
async def shared(server: EmbeddedValkey) -> AsyncIterator[PoolStore]:
    """The store's own truth, past any fallback."""
    store = RedisStore(StoreSettings(url=server.url), scheduling=SCHEDULING)
    await store.open()
    yield store.pool("default")
    await store.close()


async def _replica_on(server: EmbeddedValkey, scheduling: SchedulingSettings) -> tuple[RedisStore, Replica]:
    """A replica's store and pool, connected, known to the store and told of the members."""
    settings = StoreSettings(url=server.url, connect_timeout_s=2.0, command_timeout_s=2.0)
    primary = RedisStore(settings, scheduling=scheduling)
    await primary.open()
    pool = failover(primary.pool("default"), scheduling)
    await pool.membership()
    await pool.heartbeat("one", 60_000, {})
    return primary, Replica(pool, scheduling)


@pytest.fixture
async def replica(server: EmbeddedValkey, shared: PoolStore) -> AsyncIterator[Replica]:
    """A replica with two ready instances."""
    for instance_id in ("a", "b"):
        await shared.members.put_instance(instance(instance_id, dispatch_window_tokens=400))
    store, made = await _replica_on(server, SCHEDULING)
    yield made
    await store.close()


def stop(server: EmbeddedValkey) -> int:
    """Stop it; the port to start it on again."""
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    server.stop()
    return port


def start_again(port: int) -> EmbeddedValkey:
    server = EmbeddedValkey(port=port)
    server.start()
    return server


async def seen_when_back(replica: Replica, port: int) -> PoolSnapshot:
    """What an empty store at ``port`` holds once the replica has handed over to it."""
    again = start_again(port)
    try:
        await until(lambda: not replica.degraded)
        return await replica.pool.snapshot()
    finally:
        again.stop()


async def test_while_the_store_answers_it_decides(replica: Replica, shared: PoolStore) -> None:
    reply = await replica.place("r")

    assert (reply.status, replica.degraded) == (PlaceStatus.DISPATCHED, False)
    assert "r" in await shared.records(["r"])


async def test_without_the_store_a_replica_goes_on_from_its_last_view(replica: Replica, server: EmbeddedValkey) -> None:
    await replica.place("before")
    known = await replica.pool.membership()
    stop(server)

    seen = await replica.pool.observe(["a", "b"], CHAIN)
    held = await replica.place("during", "a")
    sent = await replica.place("other", "b")

    assert replica.degraded
    assert (seen.epoch, seen.loads["a"].pending_tokens, seen.loads["b"].pending_tokens) == (known.epoch, 400, 0)
    assert (held.status, sent.status) == (PlaceStatus.HELD, PlaceStatus.DISPATCHED)
    assert await replica.pool.membership() == known


async def test_without_the_store_every_turn_of_a_run_goes(replica: Replica, server: EmbeddedValkey) -> None:
    turns = [Turn(name, "one", RunName(name), CHAIN, 5.0) for name in ("before", "during")]
    assert (await replica.place("before", turn=turns[0], memory_tokens=1)).status is PlaceStatus.DISPATCHED
    stop(server)

    assert (await replica.place("during", "b", turn=turns[1], memory_tokens=1)).status is PlaceStatus.DISPATCHED


async def test_what_a_replica_decided_on_alone_is_freed_once_the_store_is_back(
    replica: Replica, server: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    # A captured record keeps its error, and so the frame that called the store.
    caplog.set_level(logging.ERROR, "dualmap.router.pool.failover")

    def states() -> int:
        return sum(isinstance(each, MemoryServer) for each in gc.get_objects())

    gc.collect()
    before = states()
    gc.disable()
    try:
        for request_id in ("one", "two"):
            port = stop(server)
            await replica.place(request_id)
            assert states() == before + 1

            server = start_again(port)
            await until(lambda: not replica.degraded)
            await until(lambda: states() == before)
    finally:
        gc.enable()
        server.stop()


async def test_learned_prefill_rates_are_kept_without_the_store(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await shared.publications.publish_learned(
        (await shared.membership()).learned, {"a": 123.0}, fence=await lead(shared)
    )
    told = await replica.place("told", "a")
    replica.rates = {"a": told.seen.loads["a"].prefill_tokens_per_s, "long gone": 5.0}
    stop(server)

    seen = await replica.pool.observe(["a"], CHAIN)

    assert seen.loads["a"].prefill_tokens_per_s == 123.0


async def test_without_the_store_held_requests_are_granted_by_the_replicas_own_state(
    replica: Replica, server: EmbeddedValkey
) -> None:
    grants: asyncio.Queue[Grant] = asyncio.Queue()
    replica.pool.on_grant("one", grants.put_nowait)
    await replica.place("sent")
    await replica.place("held")
    stop(server)

    await replica.first_token("sent")

    granted = await within(grants.get())
    held = (await replica.pool.records(["held"]))["held"]
    assert granted == Grant("held", "a", "one", 1, 400, running_requests=1, context_tokens=held.context_tokens)
    assert held.state is RequestState.DISPATCHED


@pytest.mark.parametrize("changes", [{}, {"queue_order": "deadline"}], ids=["configured", "changed while it ran"])
async def test_without_the_store_the_replica_sweeps_its_queues_itself_by_the_order_in_force(
    shared: PoolStore, server: EmbeddedValkey, changes: dict[str, str]
) -> None:
    if changes:
        await shared.settings.change(changes, by="an operator")
    await shared.members.put_instance(instance("a", dispatch_window_tokens=400, prefill_tokens_per_s=400.0))
    store, replica = await _replica_on(server, SCHEDULING if changes else DEADLINE)
    stop(server)
    grants: asyncio.Queue[Grant] = asyncio.Queue()
    replica.pool.on_grant("one", grants.put_nowait)
    await replica.place("sent", slo_ms=60_000, rank_ms=60_000, defers=True)
    late = await replica.place("late", slo_ms=1, rank_ms=1, defers=True)
    assert late.status is PlaceStatus.HELD

    assert (await finish(replica.pool, "sent")).done, "the caller that made the room plans nothing"

    granted = await within(grants.get(), 10)
    assert (granted.request_id, granted.deferred) == ("late", True)
    await store.close()


async def test_without_the_store_settings_that_were_changed_stay_in_force(
    shared: PoolStore, server: EmbeddedValkey
) -> None:
    await shared.settings.change({"max_deferred_s": 9.0}, by="an operator")
    await shared.members.put_instance(instance("a"))
    store, replica = await _replica_on(server, SCHEDULING)
    stop(server)
    await replica.place("r")
    assert replica.degraded

    overrides = (await replica.pool.membership()).overrides

    assert replica.pool.settings.in_force(overrides).max_deferred_s == 9.0
    await store.close()


async def test_a_store_that_refuses_the_replica_is_away_until_it_is_put_right(
    replica: Replica, server: EmbeddedValkey
) -> None:
    with redis.Redis.from_url(server.url) as operator:
        operator.execute_command("ACL", "SETUSER", "default", "-evalsha", "-fcall")

        outcome = await replica.place("r")
        assert (outcome.status, replica.degraded) == (PlaceStatus.DISPATCHED, True)

        operator.execute_command("ACL", "SETUSER", "default", "+evalsha", "+fcall")
        await until(lambda: not replica.degraded)


async def test_without_the_store_heartbeats_and_operators_are_told(replica: Replica, server: EmbeddedValkey) -> None:
    stop(server)

    with pytest.raises(StoreUnavailableError):
        await replica.pool.heartbeat("one", 1000, {})
    with pytest.raises(StoreUnavailableError):
        await replica.pool.members.put_instance(instance("c"))
    assert replica.degraded


async def test_a_replica_that_never_saw_its_members_cannot_go_on(server: EmbeddedValkey) -> None:
    primary = RedisStore(StoreSettings(url=server.url), scheduling=SCHEDULING)
    stop(server)

    with pytest.raises(StoreUnavailableError):
        await failover(primary.pool("default")).observe(["a"], CHAIN)
    await primary.close()


async def test_a_store_that_comes_back_empty_is_filled_again(replica: Replica, server: EmbeddedValkey) -> None:
    await replica.pool.members.set_instance_state("b", InstanceState.DRAINING)
    known = await replica.pool.membership()
    await replica.place("prefilled")
    await replica.first_token("prefilled")
    await replica.place("over")
    port = stop(server)
    await replica.place("during")
    await replica.finish("over")

    view = await seen_when_back(replica, port)

    assert view.instances == known.instances
    assert {request.request_id: request.state for request in view.requests} == {
        "prefilled": RequestState.PREFILLED,
        "during": RequestState.DISPATCHED,
    }
    assert (view.loads["a"].pending_tokens, view.loads["a"].running_requests) == (400, 2)


async def test_a_store_that_was_emptied_unnoticed_is_filled_again_at_the_next_call(
    replica: Replica, server: EmbeddedValkey
) -> None:
    await replica.pool.members.add_name("adapter", "lora")
    await replica.pool.settings.change({"max_deferred_s": 9.0}, by="somebody")
    await replica.pool.membership()
    await replica.place("r")
    again = start_again(stop(server))
    try:
        await asyncio.sleep(0.1)  # the lost connection is noticed; nothing was in flight
        seen = await replica.pool.observe(["a", "b"], CHAIN)
        await until(lambda: not replica.degraded)
        view = await replica.pool.snapshot()
        found = await replica.pool.membership()
    finally:
        again.stop()

    assert (found.names, found.overrides) == ({"adapter": "lora"}, {"max_deferred_s": 9.0})
    assert list(seen.loads) == ["a", "b"], "the call was served from the last view"
    assert [request.request_id for request in view.requests] == ["r"]
    assert set(view.instances) == {"a", "b"}


@pytest.mark.parametrize("key", ["instances", "instance:b", "meta"])
async def test_members_that_the_store_evicted_are_entered_again(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey, key: str
) -> None:
    known = await replica.pool.membership()
    with redis.Redis.from_url(server.url) as client:
        client.delete(f"dualmap:{{default}}:{key}")

    seen = await replica.pool.membership()
    await until(lambda: not replica.degraded)

    assert seen.instances == known.instances
    assert (await shared.membership()).instances == known.instances


async def test_after_a_partition_the_store_believes_the_replica_about_its_own_requests(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    for request_id in ("over", "prefills", "goes"):
        await replica.place(request_id, tokens=200)
    await place(shared, "others", "b", replica_id="two")
    before = await shared.records(["prefills", "goes"])
    await freeze(server, replica)

    # The replica lives on, and sends its held request, while the fleet finishes the one and moves the other.
    await replica.first_token("prefills")
    await replica.finish("over")
    await finish(shared, "prefills")
    await shared.queues.migrate(before["goes"], "b", reason="benefit", fence=await lead(shared))
    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    assert {request.request_id: (request.instance_id, request.state) for request in view.requests} == {
        "others": ("b", RequestState.DISPATCHED),
        "prefills": ("a", RequestState.PREFILLED),
        "goes": ("a", RequestState.DISPATCHED),
    }
    assert (await shared.records(["prefills"]))["prefills"].enqueued_ms == before["prefills"].enqueued_ms
    await assert_sums_hold(shared)


async def test_a_replica_is_known_again_as_soon_as_it_has_handed_over(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await replica.pool.heartbeat("one", 1, {})
    await replica.place("r", "b")
    await freeze(server, replica)
    with pytest.raises(StoreUnavailableError):
        await replica.pool.heartbeat("one", 60_000, {"requests": "1"})

    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    assert [(each.replica_id, each.info) for each in view.replicas] == [("one", {"requests": "1"})]
    assert await shared.upkeep.expired_replicas() == {}


async def test_a_replica_that_retired_without_the_store_is_not_entered_there_again(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await replica.pool.heartbeat("one", 60_000, {})
    port = stop(server)
    await replica.pool.observe(["a"], CHAIN)
    with pytest.raises(StoreUnavailableError):
        await replica.pool.retire("one")

    view = await seen_when_back(replica, port)

    assert view.replicas == ()


async def test_after_a_partition_another_replicas_request_of_the_same_id_stays(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    for request_id in ("live here too", "over here"):
        await place(shared, request_id, replica_id="two")
    others = await shared.records(["live here too", "over here"])
    await freeze(server, replica, reserving="over here")

    await replica.place("live here too")
    await replica.finish("over here")
    await until(lambda: not replica.degraded)
    seen = await replica.pool.records(["live here too"])
    finished = await replica.finish("live here too")

    assert await shared.records(["live here too", "over here"]) == others
    assert (seen["live here too"].replica_id, finished) == ("two", False)
    assert (await shared.loads())["a"].pending_tokens == 800


async def test_what_an_older_snapshot_brought_back_of_a_replica_ends_with_its_hand_over(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    for request_id in ("lives", "over", "over too"):
        await replica.place(request_id)
    await place(shared, "others", "b", replica_id="two")
    before = (await shared.snapshot()).requests
    for request_id in ("over", "over too"):
        await replica.finish(request_id)
    await shared.adopt(before)

    await freeze(server, replica)
    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    assert [request.request_id for request in view.requests] == ["lives", "others"]
    assert (await replica.place("new", "b")).status is PlaceStatus.HELD
    assert (view.loads["a"].pending_tokens, view.loads["a"].queued_requests) == (400, 0)


@pytest.mark.parametrize("skew_s", [-3600, 3600])
async def test_a_replicas_clock_does_not_enter_the_store(
    shared: PoolStore, server: EmbeddedValkey, skew_s: int
) -> None:
    """What was placed by the local clock is told in the store's, as ``recover_from`` says."""
    await shared.members.put_instance(instance("a"))
    primary = RedisStore(StoreSettings(url=server.url), scheduling=SCHEDULING)
    await primary.open()
    pool = failover(primary.pool("default"), now_ms=lambda: wall_clock_ms() + 1000 * skew_s)
    await pool.membership()
    await pool.heartbeat("one", 60_000, {})
    asked_at: list[int] = []
    pool.recover_from(lambda now_ms: asked_at.append(now_ms) or [], dict)
    again = start_again(stop(server))
    try:
        await pool.observe(["a"], CHAIN)
        await until(lambda: not pool.degraded)
        now_ms = (await pool.snapshot()).now_ms
    finally:
        await pool.close()
        await primary.close()
        again.stop()

    by_local_clock, by_the_stores = asked_at[0], asked_at[-1]
    assert abs(by_local_clock - 1000 * skew_s - now_ms) < 600_000
    assert abs(by_the_stores - now_ms) < 600_000


async def test_what_a_store_without_its_members_reserved_is_over_after_the_hand_over(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    await shared.members.put_instance(instance("b"))

    reply = await replica.place("r", "b", "a")
    assert (replica.degraded, reply.chosen.instance_id) == (True, "b"), "the store knew one member of two"
    await replica.first_token("r")
    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    assert [(each.request_id, each.state) for each in view.requests] == [("r", RequestState.PREFILLED)]
    assert set(view.instances) == {"a", "b"}
    await assert_sums_hold(shared)


class LateAnswers:
    """A store that finishes requests, and answers only when told to."""

    def __init__(self, pool: PoolStore) -> None:
        self._pool = pool
        self.finished, self.answers = asyncio.Event(), asyncio.Event()
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def membership(self) -> Membership:
        self.looks += 1
        return await self._pool.membership()

    async def observe(self, *_: object) -> Observation:
        raise StoreUnavailableError("gone for a moment")

    async def release(self, releases: Sequence[Release]) -> Sequence[Transition]:
        told = await self._pool.release(releases)
        if releases:
            self.finished.set()
            await self.answers.wait()
        return told


async def test_a_hand_over_waits_for_calls_that_are_under_way() -> None:
    shared = MemoryStore(SCHEDULING).pool("default")
    await shared.members.put_instance(instance("a"))
    primary = LateAnswers(shared)
    replica = Replica(failover(primary))
    await replica.pool.membership()
    await replica.pool.heartbeat("one", 60_000, {})
    await replica.place("r")

    finishing = asyncio.create_task(replica.finish("r"))
    await primary.finished.wait()
    await replica.pool.observe(["a"], CHAIN)
    await until(lambda: primary.looks >= 2)
    for _ in range(50):  # enough turns for a whole hand-over, which has no server to wait for here
        await asyncio.sleep(0)
    primary.answers.set()
    await finishing
    await until(lambda: not replica.degraded)

    assert (await shared.snapshot()).requests == ()
    await replica.pool.close()


class Breaking:
    """A store that goes away in the middle of a hand-over: once, after the named call has had its effect, or half of
    it."""

    def __init__(self, pool: PoolStore, call: str) -> None:
        self._pool = pool
        self._call = call
        self.broke = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def _break(self, call: str) -> None:
        if call == self._call and not self.broke:
            self.broke = True
            raise StoreUnavailableError("gone again")

    async def observe(self, *_: object) -> Observation:
        raise StoreUnavailableError("gone for a moment")

    async def snapshot(self) -> PoolSnapshot:
        view = await self._pool.snapshot()
        self._break("snapshot")
        return view

    async def release(self, releases: Sequence[Release]) -> Sequence[Transition]:
        told = await self._pool.release(releases[:1])
        self._break("release")
        return [*told, *await self._pool.release(releases[1:])]

    async def adopt(self, records: Sequence[StoredRequest]) -> int:
        adopted = await self._pool.adopt(records[:1])
        self._break("adopt")
        return adopted + await self._pool.adopt(records[1:])


@pytest.mark.parametrize("call", ["snapshot", "release", "adopt"])
async def test_a_hand_over_that_breaks_off_halfway_is_made_good_by_the_next(call: str) -> None:
    shared = MemoryStore(SCHEDULING).pool("default")
    await shared.members.put_instance(instance("a", max_queued_requests=10))
    primary = Breaking(shared, call)
    replica = Replica(failover(primary))
    await replica.pool.membership()
    await replica.pool.heartbeat("one", 60_000, {})
    for request_id in ("lives", "over", "over too"):
        await replica.place(request_id)

    await replica.pool.observe(["a"], CHAIN)
    for request_id in ("over", "over too"):
        await replica.finish(request_id)
    for request_id in ("new", "new too"):
        await replica.place(request_id)
    await until(lambda: primary.broke)
    assert replica.degraded
    await replica.finish("new")
    await replica.place("newest")
    await until(lambda: not replica.degraded)

    assert [request.request_id for request in (await shared.snapshot()).requests] == ["lives", "new too", "newest"]
    await assert_sums_hold(shared)
    await replica.pool.close()


class PassingTime:
    """A clock on which every pause is over at once, and remembered."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.pauses_s.append(delay_s)
        self.now_s += delay_s
        await asyncio.sleep(0)


async def test_a_store_that_is_away_again_after_every_hand_over_is_probed_ever_more_rarely() -> None:
    shared = MemoryStore(SCHEDULING).pool("default")
    await shared.members.put_instance(instance("a"))
    clock = PassingTime()
    replica = Replica(failover(LateAnswers(shared), clock=clock))
    await replica.pool.membership()
    await replica.pool.heartbeat("one", 60_000, {})

    async def lose_it() -> None:
        await replica.pool.observe(["a"], CHAIN)
        await until(lambda: not replica.degraded)

    for _ in range(7):
        await lose_it()
    clock.now_s += STEADY_S
    await lose_it()

    assert clock.pauses_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.05]
    await replica.pool.close()


async def test_a_store_that_refuses_what_it_is_asked_is_away_until_it_is_put_right(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await replica.place("before")
    with redis.Redis.from_url(server.url) as client:
        client.set(PoolKeys("dualmap", "default").least_loaded("mixed"), "somebody's mistake")

        during = await replica.place("during", "b")
        over = await replica.finish("before")
        degraded = replica.degraded

        client.delete(PoolKeys("dualmap", "default").least_loaded("mixed"))
    await until(lambda: not replica.degraded)

    assert (during.status, over, degraded) == (PlaceStatus.DISPATCHED, True, True)
    assert [request.request_id for request in (await shared.snapshot()).requests] == ["during"]


async def freeze(server: EmbeddedValkey, replica: Replica, *, reserving: str | None = None) -> None:
    """Keep the server from answering until the replica has given it up, then let it answer again."""

    os.kill(server.server_pid, signal.SIGSTOP)
    try:
        await (replica.pool.observe(["a"], CHAIN) if reserving is None else replica.place(reserving))
    finally:
        os.kill(server.server_pid, signal.SIGCONT)
    assert replica.degraded


async def test_calls_during_the_hand_over_wait_for_it_and_nothing_is_lost(
    replica: Replica, server: EmbeddedValkey
) -> None:
    for instance_id in ("a", "b"):
        await replica.pool.members.put_instance(instance(instance_id, max_queued_requests=10_000))
    await replica.pool.membership()
    for number in range(50):
        await replica.place(f"before{number}")
    port = stop(server)
    await replica.pool.observe(["a"], CHAIN)
    again = start_again(port)
    try:
        number = 0
        while replica.degraded:
            await replica.place(f"during{number}", "b")
            await replica.finish(f"before{number}")
            number += 1
            await asyncio.sleep(0.001)
        view = await replica.pool.snapshot()
    finally:
        again.stop()

    assert number > 0
    expected = {f"during{index}" for index in range(number)} | {f"before{index}" for index in range(number, 50)}
    assert {request.request_id for request in view.requests} == expected


async def test_a_replica_leaves_a_pool_that_a_newer_version_took_over_and_comes_back_with_it(
    replica: Replica, shared: PoolStore, server: EmbeddedValkey
) -> None:
    key, alone = PoolKeys("dualmap", "default").meta, {"schema": SCHEMA + 1, "oldest_schema": SCHEMA + 1}
    with redis.Redis.from_url(server.url) as client:
        client.hset(key, mapping=alone)
        with pytest.raises(StoreSchemaError, match="newer version"):
            await replica.pool.heartbeat("one", 60_000, {})

        sent = await replica.place("during")
        assert (sent.status, replica.degraded) == (PlaceStatus.DISPATCHED, True)
        assert client.keys("*:request:*") == []

        client.hset(key, mapping={"schema": SCHEMA, "oldest_schema": SCHEMA})
        await until(lambda: not replica.degraded)
    assert "during" in await shared.records(["during"])


async def test_where_limits_must_hold_nothing_draws_from_them_without_the_store(
    server: EmbeddedValkey, shared: PoolStore
) -> None:
    await shared.members.put_instance(instance("a", dispatch_window_tokens=4000))
    settings = StoreSettings(url=server.url, connect_timeout_s=2.0, command_timeout_s=2.0)
    primary = RedisStore(settings, scheduling=SCHEDULING)
    await primary.open()
    pool = failover(primary.pool("default"), needs_limits=True)
    await pool.membership()
    await pool.heartbeat("one", 60_000, {})
    draws = Draws.of(Draw(Budget("acme/requests/day", Limit(Measure.REQUESTS, Period.DAY, 8)), 1))
    assert (await pool.place(placement("before", "a", draws=draws))).status is PlaceStatus.DISPATCHED
    port = stop(server)

    for _ in range(2):  # the first one finds out that the store is away
        with pytest.raises(LimitsUnknownError):
            await pool.place(placement("during", "a", draws=draws))
    assert (await pool.place(placement("free", "a"))).status is PlaceStatus.DISPATCHED
    retried = placement("again", "a", draws=draws, must_draw=True)
    assert (await pool.place(retried)).status is PlaceStatus.DISPATCHED, "it was admitted before"

    again = start_again(port)
    await until(lambda: not pool.degraded)
    assert (await pool.place(placement("after", "a", draws=draws))).status is PlaceStatus.DISPATCHED
    await pool.close()
    await primary.close()
    again.stop()


async def test_without_the_store_a_replica_admits_by_the_part_that_its_pool_had_last(
    server: EmbeddedValkey, shared: PoolStore, replica: Replica
) -> None:
    limit = Limit(Measure.REQUESTS, Period.DAY, 8)
    budget = Budget("acme/requests/day", limit, Division(("default", "other"), 0, begins=True))
    draws = Draws.of(Draw(budget, 1))
    await shared.allotments.allot(Allotment(budget.name, 8, 4, stamp=1, part=6))
    await replica.place("before", "a", draws=draws)
    stop(server)

    statuses = [(await replica.place(f"during-{n}", "b", tokens=10, draws=draws)).status for n in range(7)]

    assert replica.degraded
    assert statuses == [PlaceStatus.DISPATCHED] * 6 + [PlaceStatus.LIMITED]


# the limits of tenants over an outage ---------------------------------------------------------------------------------
QUOTA = Budget("acme/requests/day", Limit(Measure.REQUESTS, Period.DAY, 8))
TOKENS = Budget("acme/tokens/day", Limit(Measure.TOKENS, Period.DAY, 1_000_000))
LIMITS = (QUOTA.limit, TOKENS.limit)
DRAWS = Draws.of(Draw(QUOTA, 1), Draw(TOKENS, 450))
DRAWING = {"draws": DRAWS, "drawn": drawn_text(DRAWS), "tenant": "acme", "account": "acme ci - m"}


@pytest.fixture
def lasting(tmp_path: Path) -> Iterator[Callable[[], contextlib.AbstractContextManager[str]]]:
    """Starts a server that forgets nothing, on one port; leaving the context kills it."""
    port = free_port()
    options = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")

    @contextlib.contextmanager
    def start() -> Iterator[str]:
        with running(binary_of("valkey"), tmp_path, *options, port=port):
            yield f"redis://127.0.0.1:{port}"

    yield start


def ended(request_id: str, prompt_tokens: int, output_tokens: int, attempt: int = 1) -> Release:
    """The end of a request that was answered by so many tokens."""
    gives_back = returned(DRAWS, prompt_tokens, output_tokens, answered=True)
    used = used_by(Outcome.COMPLETED, Charge(prompt_tokens, output_tokens, reported=True))
    return Release(request_id, "", "one", attempt, returned=gives_back, used=used)


async def used_in(pool: PoolStore) -> list[int]:
    """What is used of both limits, and what was metered: requests, prompt tokens, output tokens, lost."""
    (counts,) = (await pool.usage.of_day(await pool.usage.today())).values()
    used = await pool.usage.budgets("acme", LIMITS)
    return [*map(round, used), counts.requests, counts.prompt_tokens, counts.output_tokens, counts.lost]


async def test_what_ends_without_the_store_is_charged_once_and_truly_when_it_is_back(
    lasting: Callable[[], contextlib.AbstractContextManager[str]],
) -> None:
    with lasting() as url:
        shared = RedisStore(StoreSettings(url=url), scheduling=SCHEDULING)
        await shared.open()
        await shared.pool("default").members.put_instance(instance("a", dispatch_window_tokens=40_000))
        primary = RedisStore(
            StoreSettings(url=url, connect_timeout_s=2.0, command_timeout_s=2.0), scheduling=SCHEDULING
        )
        await primary.open()
        pool = failover(primary.pool("default"))
        ending = set[str]()
        live: dict[str, StoredRequest] = {}
        pool.recover_from(lambda now_ms: [*live.values()], dict, ending.__contains__)
        await pool.membership()
        await pool.heartbeat("one", 60_000, {})
        for name in ("finds out", "ends", "refused", "ends later", "tried again"):
            await pool.place(placement(name, "a", **DRAWING))
            live[name] = (await pool.records([name]))[name]

    # when some end without the store, some begin and end there, and one is tried again first
    await pool.release([ended("finds out", 100, 10)])
    assert pool.degraded
    await pool.release([ended("ends", 200, 20)])
    await pool.release([Release("refused", "", "one", 1, returned=DRAWS, used=used_by(Outcome.REFUSED, None))])
    await pool.release([Release("tried again", "", "one", 1, used=KEPT)])
    await pool.place(placement("tried again", "a", attempt=2, must_draw=True, **DRAWING))
    await pool.release([ended("tried again", 300, 30, attempt=2)])
    await pool.place(placement("during", "a", **DRAWING))
    await pool.release([ended("during", 400, 40)])
    for name in ("finds out", "ends", "refused", "tried again"):
        del live[name]
    # and one has ended whose release is still on its way
    del live["ends later"]
    ending.add("ends later")

    with lasting():
        await until(lambda: not pool.degraded)
        await pool.release([ended("ends later", 500, 50)])
        assert await used_in(shared.pool("default")) == [5, 1650, 6, 1500, 150, 0]
        assert not await shared.pool("default").requests_of("one")

        # then nothing is told twice, also not after another outage
        for again in (ended("ends", 200, 20), ended("during", 400, 40)):
            await pool.release([again])
        assert await used_in(shared.pool("default")) == [5, 1650, 6, 1500, 150, 0]
    with pytest.raises(StoreUnavailableError):
        await pool.overview()
    with lasting():
        await until(lambda: not pool.degraded)
        assert await used_in(shared.pool("default")) == [5, 1650, 6, 1500, 150, 0]
        await pool.close()
        await primary.close()
        await shared.close()


async def test_the_last_ends_that_a_crashed_store_forgot_are_told_again(
    lasting: Callable[[], contextlib.AbstractContextManager[str]], tmp_path: Path
) -> None:
    files, earlier = tmp_path / "appendonlydir", tmp_path / "earlier"
    with lasting() as url:
        primary = RedisStore(
            StoreSettings(url=url, connect_timeout_s=2.0, command_timeout_s=2.0), scheduling=SCHEDULING
        )
        await primary.open()
        pool = failover(primary.pool("default"))
        await pool.members.put_instance(instance("a", dispatch_window_tokens=400))
        await pool.membership()
        await pool.heartbeat("one", 60_000, {})
        await pool.place(placement("r", "a", **DRAWING))
        shutil.copytree(files, earlier)
        await pool.release([ended("r", 100, 10)])
        assert await used_in(primary.pool("default")) == [1, 110, 1, 100, 10, 0]
    with pytest.raises(StoreUnavailableError):
        await pool.overview()

    shutil.rmtree(files)
    earlier.rename(files)  # what was written last never reached the disk
    with lasting():
        await until(lambda: not pool.degraded)
        assert await used_in(primary.pool("default")) == [1, 110, 1, 100, 10, 0]
        await pool.close()
        await primary.close()
