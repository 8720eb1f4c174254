"""A replica without its store: it goes on, and when the store is back they agree."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import redis

from scheduling.instance import InstanceState
from scheduling.settings import SchedulingSettings
from statestore.base import Grant, Membership, Observation, PoolSnapshot, PoolStore, RequestRecord, RequestState
from statestore.embedded import EmbeddedValkey
from statestore.errors import StoreUnavailableError
from statestore.failover import FailoverPool, FailoverStore
from statestore.failover.pool import STEADY_S
from statestore.keys import PoolKeys
from statestore.memory import MemoryPool, MemoryStore, wall_clock_ms
from statestore.redis import RedisStore
from statestore.reservation import Newcomer, ReserveStatus
from statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, instance, reservation
from tests.statestore.test_contract_requests import assert_sums_hold

WIDE = SchedulingSettings(policy="dualmap-wide")


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


async def _replica_on(server: EmbeddedValkey, scheduling: SchedulingSettings) -> tuple[FailoverStore, FailoverPool]:
    """A replica's store and pool, connected and told of the members."""
    settings = StoreSettings(url=server.url, connect_timeout_s=2.0, command_timeout_s=2.0)
    primary = RedisStore(settings, scheduling=scheduling, batched=True)
    await primary.open()
    store = FailoverStore(primary, scheduling)
    pool = store.pool("default")
    await pool.membership()
    return store, pool


@pytest.fixture
async def replica(server: EmbeddedValkey, shared: PoolStore) -> AsyncIterator[FailoverPool]:
    """A replica's pool with two ready instances, connected and told of them."""
    for instance_id in ("a", "b"):
        await shared.put_instance(instance(instance_id, dispatch_window_tokens=400))
    store, pool = await _replica_on(server, SCHEDULING)
    yield pool
    await store.close()


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Poll to a deadline."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def stop(server: EmbeddedValkey) -> int:
    """Stop it; the port to start it on again."""
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    server.stop()
    return port


def start_again(port: int) -> EmbeddedValkey:
    server = EmbeddedValkey(port=port)
    server.start()
    return server


async def seen_when_back(replica: FailoverPool, port: int) -> PoolSnapshot:
    """What an empty store at ``port`` holds once the replica has handed over to it."""
    again = start_again(port)
    try:
        await until(lambda: not replica.degraded)
        return await replica.snapshot()
    finally:
        again.stop()


async def test_while_the_store_answers_it_decides(replica: FailoverPool, shared: PoolStore) -> None:
    outcome = await replica.reserve(reservation("r"))

    assert (outcome.status, replica.degraded) == (ReserveStatus.DISPATCHED, False)
    assert "r" in await shared.records(["r"])


async def test_without_the_store_a_replica_goes_on_from_its_last_view(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    await replica.reserve(reservation("before"))
    known = await replica.membership()
    stop(server)

    seen = await replica.observe(["a", "b"], CHAIN)
    held = await replica.reserve(reservation("during", "a"))
    sent = await replica.reserve(reservation("other", "b"))

    assert replica.degraded
    assert (seen.epoch, seen.loads["a"].pending_tokens, seen.loads["b"].pending_tokens) == (known.epoch, 400, 0)
    assert (held.status, sent.status) == (ReserveStatus.HELD, ReserveStatus.DISPATCHED)
    assert await replica.membership() == known


async def test_a_replica_looks_beyond_its_candidates_with_and_without_the_store(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    shared_view = (await replica.observe([], CHAIN, horizon=True)).horizon
    stop(server)

    local_view = (await replica.observe([], CHAIN, horizon=True)).horizon

    assert shared_view is not None
    assert local_view == shared_view
    assert [name for name, _ in local_view.lightest] == ["a", "b"]


async def test_without_the_store_held_requests_are_granted_by_the_replicas_own_ledger(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    grants = replica.grants("one")
    await replica.reserve(reservation("sent"))
    await replica.reserve(reservation("held"))
    stop(server)

    await replica.first_token("sent", "a", CHAIN)

    assert await asyncio.wait_for(anext(grants), 5) == Grant("held", "a", 1, 400)
    assert (await replica.records(["held"]))["held"].state is RequestState.DISPATCHED


async def test_without_the_store_nobody_is_held_longer_than_anybody_may_be(
    shared: PoolStore, server: EmbeddedValkey
) -> None:
    scheduling = SCHEDULING.model_copy(update={"queue_order": "deadline", "max_hold_s": 0.3})
    await shared.put_instance(instance("a", dispatch_window_tokens=400))
    store, pool = await _replica_on(server, scheduling)
    stop(server)
    grants = pool.grants("one")

    await pool.reserve(reservation("sent"))
    late = await pool.reserve(reservation("late", slo_ms=1))

    assert late.status is ReserveStatus.HELD
    assert await asyncio.wait_for(anext(grants), 10) == Grant("late", "a", 1, 400)
    await store.close()


async def test_a_store_that_refuses_the_replica_is_away_until_it_is_put_right(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    with redis.Redis.from_url(server.url) as operator:
        operator.execute_command("ACL", "SETUSER", "default", "-evalsha")

        outcome = await replica.reserve(reservation("r"))
        assert (outcome.status, replica.degraded) == (ReserveStatus.DISPATCHED, True)

        operator.execute_command("ACL", "SETUSER", "default", "+evalsha")
        await until(lambda: not replica.degraded)


async def test_without_the_store_heartbeats_and_operators_are_told(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    stop(server)

    with pytest.raises(StoreUnavailableError):
        await replica.heartbeat("one", 1000, {})
    with pytest.raises(StoreUnavailableError):
        await replica.put_instance(instance("c"))
    assert replica.degraded


async def test_a_replica_that_never_saw_its_members_cannot_go_on(server: EmbeddedValkey) -> None:
    primary = RedisStore(StoreSettings(url=server.url), scheduling=SCHEDULING, batched=True)
    store = FailoverStore(primary, SCHEDULING)
    stop(server)

    with pytest.raises(StoreUnavailableError):
        await store.pool("default").observe(["a"], CHAIN)
    await store.close()


async def test_a_store_that_comes_back_empty_is_filled_again(replica: FailoverPool, server: EmbeddedValkey) -> None:
    await replica.set_instance_state("b", InstanceState.DRAINING)
    known = await replica.membership()
    await replica.reserve(reservation("prefilled"))
    await replica.first_token("prefilled", "a", CHAIN)
    await replica.reserve(reservation("over"))
    port = stop(server)
    await replica.reserve(reservation("during"))
    await replica.finish("over")

    view = await seen_when_back(replica, port)

    assert view.instances == known.instances
    assert {request.request_id: request.state for request in view.requests} == {
        "prefilled": RequestState.PREFILLED,
        "during": RequestState.DISPATCHED,
    }
    assert (view.loads["a"].pending_tokens, view.loads["a"].running_requests) == (400, 2)


async def test_a_store_that_was_emptied_unnoticed_is_filled_again_at_the_next_call(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    await replica.reserve(reservation("r"))
    again = start_again(stop(server))
    try:
        await asyncio.sleep(0.1)  # the lost connection is noticed; nothing was in flight
        seen = await replica.observe(["a", "b"], CHAIN)
        await until(lambda: not replica.degraded)
        view = await replica.snapshot()
    finally:
        again.stop()

    assert list(seen.loads) == ["a", "b"], "the call was served from the last view"
    assert [request.request_id for request in view.requests] == ["r"]
    assert set(view.instances) == {"a", "b"}


@pytest.mark.parametrize("key", ["instances", "instance:b", "meta"])
async def test_members_that_the_store_evicted_are_entered_again(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey, key: str
) -> None:
    known = await replica.membership()
    with redis.Redis.from_url(server.url) as client:
        client.delete(f"dualmap:{{default}}:{key}")

    seen = await replica.membership()
    await until(lambda: not replica.degraded)

    assert seen.instances == known.instances
    assert (await shared.membership()).instances == known.instances


async def test_after_a_partition_the_store_believes_the_replica_about_its_own_requests(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    for request_id in ("over", "moves", "prefills"):
        await replica.reserve(reservation(request_id, alternative_id="b", alternative_uncached_tokens=400))
    await shared.reserve(reservation("others", "b", replica_id="two"))
    before = {request.request_id: request.sequence for request in (await shared.snapshot()).requests}
    await freeze(server, replica)

    # The replica lives on while the fleet believes that its held request moved.
    await replica.finish("over")
    await replica.first_token("moves", "a", CHAIN)
    lease = await shared.acquire_lease("worker", 60_000)
    assert lease is not None
    await shared.migrate("moves", "a", "b", reason="benefit", fence=lease.fence)
    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    mine = {request.request_id: (request.instance_id, request.state) for request in view.requests}
    assert mine == {
        "others": ("b", RequestState.DISPATCHED),
        "moves": ("a", RequestState.PREFILLED),
        "prefills": ("a", RequestState.DISPATCHED),
    }
    assert (view.loads["a"].pending_tokens, view.loads["b"].pending_tokens) == (400, 400)
    assert all(request.sequence == before[request.request_id] for request in view.requests)


async def test_a_replica_is_known_again_as_soon_as_it_has_handed_over(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await replica.heartbeat("one", 1, {})
    await replica.reserve(reservation("r", "b"))
    await freeze(server, replica)
    with pytest.raises(StoreUnavailableError):
        await replica.heartbeat("one", 60_000, {"requests": "1"})

    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    assert [(each.replica_id, each.info) for each in view.replicas] == [("one", {"requests": "1"})]
    assert await shared.expired_replicas() == {}


async def test_a_replica_that_retired_without_the_store_is_not_entered_there_again(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await replica.heartbeat("one", 60_000, {})
    port = stop(server)
    await replica.observe(["a"], CHAIN)
    with pytest.raises(StoreUnavailableError):
        await replica.retire("one")

    view = await seen_when_back(replica, port)

    assert view.replicas == ()


async def test_after_a_partition_another_replicas_request_of_the_same_id_stays(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    for request_id in ("live here too", "over here"):
        await shared.reserve(reservation(request_id, replica_id="two"))
    others = await shared.records(["live here too", "over here"])
    await freeze(server, replica, reserving="over here")

    await replica.reserve(reservation("live here too"))
    await replica.finish("over here", replica_id="one", attempt=1)
    await until(lambda: not replica.degraded)
    seen = await replica.records(["live here too"])
    finished = await replica.finish("live here too", replica_id="one", attempt=1)

    assert await shared.records(["live here too", "over here"]) == others
    assert (seen["live here too"].replica_id, finished) == ("two", False)
    assert (await shared.loads())["a"].pending_tokens == 800


async def test_what_an_older_snapshot_brought_back_of_a_replica_ends_with_its_hand_over(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    for request_id in ("lives", "over", "over too"):
        await replica.reserve(reservation(request_id))
    await shared.reserve(reservation("others", "b", replica_id="two"))
    before = (await shared.snapshot()).requests
    for request_id in ("over", "over too"):
        await replica.finish(request_id, replica_id="one", attempt=1)
    await shared.adopt(before)

    await freeze(server, replica)
    await until(lambda: not replica.degraded)

    view = await shared.snapshot()
    assert [request.request_id for request in view.requests] == ["lives", "others"]
    assert (await replica.reserve(reservation("new", "b"))).status is ReserveStatus.HELD
    assert (view.loads["a"].pending_tokens, view.loads["a"].queued_requests) == (400, 0)


@pytest.mark.parametrize("skew_s", [-3600, 3600])
async def test_a_replicas_clock_does_not_enter_the_store(
    shared: PoolStore, server: EmbeddedValkey, skew_s: int
) -> None:
    await shared.put_instance(instance("a"))
    primary = RedisStore(StoreSettings(url=server.url), scheduling=SCHEDULING, batched=True)
    await primary.open()
    pool = FailoverPool(primary.pool("default"), SCHEDULING, now_ms=lambda: wall_clock_ms() + 1000 * skew_s)
    await pool.membership()
    await pool.reserve(reservation("before"))
    await pool.records(["before"])
    again = start_again(stop(server))
    try:
        await pool.observe(["a"], CHAIN)
        await pool.reserve(reservation("during"))
        await until(lambda: not pool.degraded)
        view = await pool.snapshot()
    finally:
        await pool.close()
        await primary.close()
        again.stop()

    assert [request.request_id for request in view.requests] == ["before", "during"]
    times_ms = [time_ms for request in view.requests for time_ms in (request.enqueued_ms, request.dispatched_ms)]
    assert all(abs(time_ms - view.now_ms) < 600_000 for time_ms in times_ms)
    assert [request.prefilled_ms for request in view.requests] == [0, 0]


@pytest.fixture
async def wide_replica(server: EmbeddedValkey, shared: PoolStore) -> AsyncIterator[FailoverPool]:
    """``replica`` of a policy by which placements can leave nothing to weigh."""
    for instance_id in ("a", "b"):
        await shared.put_instance(instance(instance_id))
    store, pool = await _replica_on(server, WIDE)
    yield pool
    await store.close()


def newcomer(request_id: str) -> Newcomer:
    return Newcomer(request_id, "one", CHAIN, expected_output_tokens=50, slo_ms=5000)


async def test_what_was_reserved_as_it_was_observed_is_known_when_the_store_goes(
    wide_replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    _, before = await wide_replica.reserve_idle(("a", "b"), newcomer("before"))
    assert "before" in await shared.records(["before"])
    stop(server)

    seen, during = await wide_replica.reserve_idle(("b",), newcomer("during"))

    assert wide_replica.degraded
    assert (before and before.decision.instance_id, during and during.decision.instance_id) == ("a", "b")
    assert seen.loads["b"].pending_tokens == 0
    loads = (await wide_replica.observe(["a", "b"], CHAIN)).loads
    assert [load.pending_tokens for load in loads.values()] == [400, 400]


async def test_what_a_store_without_its_members_reserved_is_over_after_the_hand_over(
    wide_replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    await shared.put_instance(instance("b"))

    _, placement = await wide_replica.reserve_idle(("b", "a"), newcomer("r"))
    assert placement is not None
    assert wide_replica.degraded, "the store knew one member of two"
    await wide_replica.first_token("r", placement.decision.instance_id, CHAIN)
    await until(lambda: not wide_replica.degraded)

    view = await shared.snapshot()
    assert [(each.request_id, each.state) for each in view.requests] == [("r", RequestState.PREFILLED)]
    assert set(view.instances) == {"a", "b"}
    assert [load.pending_tokens for load in view.loads.values()] == [0, 0]
    client.close()


class LateAnswers:
    """A store that finishes requests, and answers only when told to."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self.finished, self.answers = asyncio.Event(), asyncio.Event()
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def membership(self) -> Membership:
        self.looks += 1
        return await self._pool.membership()

    async def observe(self, *_: object, **__: object) -> Observation:
        raise StoreUnavailableError("gone for a moment")

    async def finish(self, request_id: str, **facts: Any) -> bool:
        released = await self._pool.finish(request_id, **facts)
        self.finished.set()
        await self.answers.wait()
        return released


async def test_a_hand_over_waits_for_calls_that_are_under_way() -> None:
    shared = MemoryStore(SCHEDULING).pool("default")
    await shared.put_instance(instance("a"))
    primary = LateAnswers(shared)
    replica = FailoverPool(cast(PoolStore, primary), SCHEDULING)
    await replica.membership()
    await replica.reserve(reservation("r"))

    finishing = asyncio.create_task(replica.finish("r"))
    await primary.finished.wait()
    await replica.observe(["a"], CHAIN)
    await until(lambda: primary.looks >= 2)
    for _ in range(50):  # enough turns for a whole hand-over, which has no server to wait for here
        await asyncio.sleep(0)
    primary.answers.set()
    await finishing
    await until(lambda: not replica.degraded)

    assert (await shared.snapshot()).requests == ()
    await replica.close()


class Breaking:
    """A store that goes away in the middle of a hand-over: once, after the named call has had its effect, or half of
    it."""

    def __init__(self, pool: MemoryPool, call: str) -> None:
        self._pool = pool
        self._call = call
        self.broke = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def _break(self, call: str) -> None:
        if call == self._call and not self.broke:
            self.broke = True
            raise StoreUnavailableError("gone again")

    async def observe(self, *_: object, **__: object) -> Observation:
        raise StoreUnavailableError("gone for a moment")

    async def snapshot(self) -> PoolSnapshot:
        view = await self._pool.snapshot()
        self._break("snapshot")
        return view

    async def finish(self, request_id: str, **facts: Any) -> bool:
        released = await self._pool.finish(request_id, **facts)
        self._break("finish")
        return released

    async def adopt(self, records: Sequence[RequestRecord]) -> int:
        adopted = await self._pool.adopt(records[:1])
        self._break("adopt")
        return adopted + await self._pool.adopt(records[1:])


@pytest.mark.parametrize("call", ["snapshot", "finish", "adopt"])
async def test_a_hand_over_that_breaks_off_halfway_is_made_good_by_the_next(call: str) -> None:
    shared = MemoryStore(SCHEDULING).pool("default")
    await shared.put_instance(instance("a", max_queued_requests=10))
    primary = Breaking(shared, call)
    replica = FailoverPool(cast(PoolStore, primary), SCHEDULING)
    await replica.membership()
    for request_id in ("lives", "over", "over too"):
        await replica.reserve(reservation(request_id))

    await replica.observe(["a"], CHAIN)
    for request_id in ("over", "over too"):
        await replica.finish(request_id)
    for request_id in ("new", "new too"):
        await replica.reserve(reservation(request_id))
    await until(lambda: primary.broke)
    assert replica.degraded
    await replica.finish("new")
    await replica.reserve(reservation("newest"))
    await until(lambda: not replica.degraded)

    assert [request.request_id for request in (await shared.snapshot()).requests] == ["lives", "new too", "newest"]
    await assert_sums_hold(shared)
    await replica.close()


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
    await shared.put_instance(instance("a"))
    clock = PassingTime()
    replica = FailoverPool(cast(PoolStore, LateAnswers(shared)), SCHEDULING, clock=clock)
    await replica.membership()

    async def lose_it() -> None:
        await replica.observe(["a"], CHAIN)
        await until(lambda: not replica.degraded)

    for _ in range(7):
        await lose_it()
    clock.now_s += STEADY_S
    await lose_it()

    assert clock.pauses_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.05]
    await replica.close()


async def test_a_store_that_refuses_what_it_is_asked_is_away_until_it_is_put_right(
    replica: FailoverPool, shared: PoolStore, server: EmbeddedValkey
) -> None:
    await replica.reserve(reservation("before"))
    with redis.Redis.from_url(server.url) as client:
        client.set(PoolKeys("dualmap", "default").requests, "somebody's mistake")

        during = await replica.reserve(reservation("during", "b"))
        over = await replica.finish("before")
        degraded = replica.degraded

        client.delete(PoolKeys("dualmap", "default").requests)
    await until(lambda: not replica.degraded)

    assert (during.status, over, degraded) == (ReserveStatus.DISPATCHED, True, True)
    assert [request.request_id for request in (await shared.snapshot()).requests] == ["during"]


async def freeze(server: EmbeddedValkey, replica: FailoverPool, *, reserving: str | None = None) -> None:
    """Keep the server from answering until the replica has given it up, then let it answer again."""

    os.kill(server.server_pid, signal.SIGSTOP)
    try:
        await (replica.observe(["a"], CHAIN) if reserving is None else replica.reserve(reservation(reserving)))
    finally:
        os.kill(server.server_pid, signal.SIGCONT)
    assert replica.degraded


async def test_calls_during_the_hand_over_wait_for_it_and_nothing_is_lost(
    replica: FailoverPool, server: EmbeddedValkey
) -> None:
    for instance_id in ("a", "b"):
        await replica.put_instance(instance(instance_id, max_queued_requests=10_000))
    await replica.membership()
    for number in range(50):
        await replica.reserve(reservation(f"before{number}"))
    port = stop(server)
    await replica.observe(["a"], CHAIN)
    again = start_again(port)
    try:
        number = 0
        while replica.degraded:
            await replica.reserve(reservation(f"during{number}", "b"))
            await replica.finish(f"before{number}")
            number += 1
            await asyncio.sleep(0.001)
        view = await replica.snapshot()
    finally:
        again.stop()

    assert number > 0
    expected = {f"during{index}" for index in range(number)} | {f"before{index}" for index in range(number, 50)}
    assert {request.request_id for request in view.requests} == expected
