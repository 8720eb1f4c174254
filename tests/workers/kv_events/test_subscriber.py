"""Following an engine's events over ZeroMQ, through everything that gets lost on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq.asyncio

from dualmap.runtime.clock import RealClock
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, Tier
from dualmap.scheduling.estimates.load_prices import PRIORS
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.simulation.emulator.kv_publisher import KvEventPublisher
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvChange, KvViewStatus
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.changes import Changes
from dualmap.workers.kv_events import sockets, view_writer
from dualmap.workers.kv_events import subscriber as subscribing
from dualmap.workers.kv_events.engine_view import EngineView
from dualmap.workers.kv_events.sockets import EventSockets
from dualmap.workers.kv_events.source import EventSource
from dualmap.workers.kv_events.subscriber import Subscriber
from dualmap.workers.kv_events.view_writer import ViewWriter
from dualmap.workers.metrics import WorkerMetrics
from tests.workers.kv_events.engine import BLOCK_TOKENS, EngineCache, chain, is_exactly, record_of, until

ANY = "tcp://127.0.0.1:0"
PROMPT = list(range(100, 132))
OTHER = [*PROMPT[:16], *range(500, 516)]
TIERS = {Tier.HOST: 400, Tier.DISK: 4000}


@pytest.fixture
async def pool() -> PoolStore:
    pool = MemoryStore(SchedulingSettings()).pool("default")
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    return pool


@pytest.fixture
async def publish() -> AsyncIterator[Callable[..., KvEventPublisher]]:
    """Publishers that are closed at the end."""
    async with AsyncExitStack() as stack:

        def opened(endpoint: str = ANY, replay_endpoint: str | None = ANY, **named: Any) -> KvEventPublisher:
            publisher = KvEventPublisher(endpoint, replay_endpoint, "kv@a", **named)
            stack.push_async_callback(publisher.close)
            return publisher

        yield opened


@asynccontextmanager
async def following(
    pool: Any, publisher: KvEventPublisher, worker_id: str = "worker-1", *, rank: int | None = None
) -> AsyncIterator[WorkerMetrics]:
    """A subscriber for the time of the context."""
    context, metrics, clock = zmq.asyncio.Context(), WorkerMetrics(), RealClock()
    source = EventSource("a", publisher.endpoint, publisher.replay_endpoint, "kv@", rank)
    writer = ViewWriter(pool, source, tiers=TIERS, clock=clock, metrics=metrics, wall_s=time.time)
    await pool.kv_events.renew_subscriber(worker_id, 60_000)
    run = Subscriber("default", source, worker_id, writer, context=context, clock=clock, metrics=metrics).run()
    task = asyncio.create_task(run)
    try:
        yield metrics
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


def gaps(metrics: WorkerMetrics, outcome: str) -> float:
    return (
        metrics.registry.get_sample_value("dualmap_worker_kv_event_gaps_total", {"pool": "default", "outcome": outcome})
        or 0.0
    )


async def found(pool: PoolStore, ids: list[int]) -> int:
    """Blocks of a prompt that are believed to be on the device or in host memory."""
    return (await pool.observe(["a"], chain(ids))).loads["a"].hit_blocks


async def test_what_host_memory_keeps_and_forgets_reaches_placements(pool: PoolStore, publish: Any) -> None:
    await pool.tiers.describe("a", InstanceTiers((InstanceTier(Tier.HOST, TIERS[Tier.HOST], PRIORS[Tier.HOST]),)))
    engine, names = EngineCache(publish()), dict[tuple[int, ...], int]()
    async with following(pool, engine.publisher) as metrics:
        engine.store(PROMPT)
        engine.offload(PROMPT)
        names |= engine.names
        for end in range(len(PROMPT), 0, -BLOCK_TOKENS):
            engine.evict(PROMPT[:end])
        await until(lambda: is_exactly(pool, engine))
        kept = await found(pool, PROMPT)
        engine.names |= names
        engine.offload(PROMPT[:8], "BlockRemoved")
        removed = "dualmap_worker_kv_event_blocks_total", {"pool": "default", "kind": "tier_removed"}
        await until(lambda: metrics.registry.get_sample_value(*removed))

    assert kept == 7, "the last token of a prompt is computed, so that its block is not loaded"
    assert await found(pool, PROMPT) == 0, "a hit has no gap"
    assert metrics.registry.get_sample_value(removed[0], removed[1] | {"kind": "tier_stored"}) == 8


async def test_an_engine_that_starts_has_nothing_in_host_memory_and_keeps_its_disk(
    pool: PoolStore, publish: Any
) -> None:
    engine = EngineCache(publish())
    tiers = [InstanceTier(tier, TIERS[tier], PRIORS[tier]) for tier in TIERS]
    async with following(pool, engine.publisher):
        engine.store(PROMPT)
        engine.offload(PROMPT)
        engine.offload(PROMPT[:16], medium="STORAGE")
        await until(lambda: is_exactly(pool, engine))
    await pool.tiers.describe("a", InstanceTiers(tuple(tiers)))
    other = EngineCache(publish())
    async with following(pool, other.publisher):
        await until(lambda: is_exactly(pool, other))

    assert await found(pool, PROMPT) == 4


async def test_a_memory_that_is_not_known_leaves_the_instance_estimated_with_the_reason(
    pool: PoolStore, publish: Any
) -> None:
    engine = EngineCache(publish())
    async with following(pool, engine.publisher):
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        engine.offload(PROMPT, medium="tape")

        async def is_estimated() -> bool:
            return (await record_of(pool)).status is KvViewStatus.ESTIMATE

        await until(is_estimated)

    assert "a memory that is not known, 'tape'" in (await record_of(pool)).reason


async def test_the_view_is_what_the_engine_holds(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish())
    engine.store(PROMPT)
    async with following(pool, engine.publisher) as metrics:
        await until(lambda: is_exactly(pool, engine))
        engine.store(OTHER)
        engine.evict(PROMPT)
        await until(lambda: is_exactly(pool, engine))

    assert gaps(metrics, "filled") == 0
    assert (await record_of(pool)).owner == ""


@pytest.mark.parametrize("replays_topic", [True, False])
async def test_batches_that_were_lost_are_replayed_in_either_form(
    pool: PoolStore, publish: Any, replays_topic: bool
) -> None:
    engine = EngineCache(publish(replays_topic=replays_topic))
    async with following(pool, engine.publisher) as metrics:
        await until(lambda: is_exactly(pool, engine))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        engine.evict(PROMPT, published=False)
        engine.evict(PROMPT[:28], published=False)
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))

    assert gaps(metrics, "filled") == 1


@pytest.mark.parametrize(("kept_batches", "status"), [(100, KvViewStatus.EXACT), (12, KvViewStatus.PARTIAL)])
async def test_what_a_long_replay_drops_is_asked_for_again(
    pool: PoolStore, publish: Any, kept_batches: int, status: KvViewStatus, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineCache(publish(replay_room=3, kept_batches=kept_batches))
    for _ in range(10):
        engine.store(PROMPT[:4])
        engine.evict(PROMPT[:4])
    engine.store(OTHER)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine, status))

    assert "not followed" not in caplog.text


async def test_a_replay_that_drops_all_but_its_first_batch_is_tried_again_later(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineCache(publish(replay_room=1))
    for _ in range(10):
        engine.store(PROMPT[:4])
        engine.evict(PROMPT[:4])
    async with following(pool, engine.publisher):
        await until(lambda: _says(pool, "a replay has 19 after 0"))


async def test_without_a_replay_a_gap_empties_the_view(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(replay_endpoint=None))
    async with following(pool, engine.publisher) as metrics:
        await until(lambda: _connected(pool))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        engine.evict(PROMPT, published=False)
        engine.names.clear()
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))

    assert gaps(metrics, "dropped") == 1


async def test_without_a_replay_blocks_behind_a_gap_are_placed_by_the_names_before_it(
    pool: PoolStore, publish: Any
) -> None:
    engine = EngineCache(publish(replay_endpoint=None))
    longer = [*PROMPT, 901, 902, 903, 904]
    async with following(pool, engine.publisher):
        await until(lambda: _connected(pool))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        engine.store(OTHER, published=False)
        engine.store(longer)
        engine.names = {tuple(longer): engine.names[tuple(longer)]}
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))


async def _connected(pool: PoolStore) -> bool:
    await asyncio.sleep(0.3)  # a publisher does not tell when a subscription has arrived
    return (await record_of(pool)).status is KvViewStatus.PARTIAL


async def test_a_first_sequence_above_0_is_no_whole_life(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(kept_batches=1))
    engine.store(PROMPT[:8])
    engine.names.clear()
    engine.store(OTHER)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))

    assert (await record_of(pool)).reason == "the engine no longer keeps its first events"


async def test_another_worker_reads_on_where_the_first_one_stopped(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(kept_batches=3))
    engine.store(PROMPT)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
    engine.store(OTHER)
    engine.evict(PROMPT)
    async with following(pool, engine.publisher, "worker-2"):
        await until(lambda: is_exactly(pool, engine))
        engine.evict(OTHER)
        await until(lambda: is_exactly(pool, engine))

    assert (await record_of(pool)).sequence == 3


async def test_another_worker_continues_a_partial_view_as_such_and_what_was_cleared_as_exact(
    pool: PoolStore, publish: Any
) -> None:
    engine = EngineCache(publish(kept_batches=3))
    for length in (4, 8, 12):
        engine.store(PROMPT[:length])
    engine.names.clear()
    engine.store(OTHER)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))
    async with following(pool, engine.publisher, "worker-2"):
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))
        engine.clear()
        await until(lambda: is_exactly(pool, engine))
        engine.store(PROMPT, published=False)
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))


async def test_a_worker_that_takes_over_tells_all_names_at_once(pool: PoolStore, publish: Any) -> None:
    """How many changes of them the store keeps is not known to it."""
    key = PoolKeys("dualmap", "default").kv_names("a")
    engine = EngineCache(publish())
    async with following(pool, engine.publisher):
        for length in (8, 16, 32):
            engine.store(PROMPT[:length])
            await until(lambda: is_exactly(pool, engine))
    kept = len(await pool._calls.command("LRANGE", key, 0, -1))
    async with following(pool, engine.publisher, "worker-2"):
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))

    assert (kept, len(await pool._calls.command("LRANGE", key, 0, -1))) == (3, 1)


async def test_names_are_told_again_so_that_their_changes_do_not_pile_up(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_writer, "NAMES_SENT", 4)
    applied: list[KvChange] = []
    apply = pool.kv_events.apply

    async def noted(instance_id: str, fence: int, change: KvChange) -> int:
        applied.append(change)
        return await apply(instance_id, fence, change)

    pool.kv_events.apply = noted
    engine = EngineCache(publish())
    async with following(pool, engine.publisher):
        for _ in range(8):
            for change in (engine.store, engine.evict):
                change(PROMPT)
                await until(lambda: is_exactly(pool, engine))
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))
        told_again = [len(change.names) for change in applied if change.all_names]
    assert told_again and sum(told_again) < sum(len(change.names) for change in applied)

    async with following(pool, engine.publisher, "worker-2"):
        engine.evict(OTHER)
        await until(lambda: is_exactly(pool, engine))
        assert len(await pool.kv_events.names("a")) == len(engine.names)


async def test_a_subscriber_ends_whenever_it_is_cancelled(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(kept_batches=2))
    engine.store(PROMPT)
    for turns in range(60):  # of the event loop, until it is cancelled: while it claims, asks for a replay, reads on
        following_turns = following(pool, engine.publisher, f"worker-{turns}")
        async with asyncio.timeout(60), following_turns:
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_a_worker_that_comes_too_late_for_the_replay_begins_again(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(kept_batches=2))
    engine.store(PROMPT)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
    engine.store(OTHER)
    engine.evict(PROMPT)
    engine.evict(OTHER)
    engine.names.clear()
    async with following(pool, engine.publisher, "worker-2"):
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))


@pytest.mark.parametrize("batches", [0, 1, 3])
async def test_an_engine_that_starts_again_leaves_no_ghosts(pool: PoolStore, publish: Any, batches: int) -> None:
    engine = EngineCache(publish())
    async with following(pool, engine.publisher) as metrics:
        engine.store(PROMPT)
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))
        endpoints = engine.publisher.endpoint, engine.publisher.replay_endpoint
        await engine.publisher.close()
        engine = EngineCache(publish(*endpoints))
        for number in range(batches):
            engine.store([number] * 8)
        await until(lambda: is_exactly(pool, engine))

    assert gaps(metrics, "restarted") == 1


async def test_an_engine_that_starts_again_without_a_replay_leaves_no_ghosts(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(replay_endpoint=None))
    async with following(pool, engine.publisher):
        await until(lambda: _connected(pool))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        endpoint = engine.publisher.endpoint
        await engine.publisher.close()
        engine = EngineCache(publish(endpoint, None))
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))
        await until(lambda: _connected(pool))
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))


async def test_a_publisher_may_come_after_its_subscriber(pool: PoolStore, publish: Any) -> None:
    gone = publish()
    await gone.close()
    async with following(pool, gone):
        await until(lambda: _says(pool, "does not answer"))
        engine = EngineCache(publish(gone.endpoint, gone.replay_endpoint))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))


async def _says(pool: PoolStore, reason: str) -> bool:
    return reason in (await record_of(pool)).reason


async def test_a_cache_that_was_cleared_is_known_to_be_empty(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(kept_batches=1))
    engine.store(PROMPT)
    engine.store(OTHER)
    async with following(pool, engine.publisher):
        await until(lambda: _says(pool, "no longer keeps"))
        engine.clear()
        engine.store(PROMPT[:8])
        await until(lambda: is_exactly(pool, engine))


async def test_what_was_lost_after_a_cache_was_cleared_is_replayed(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(kept_batches=3))
    async with following(pool, engine.publisher) as metrics:
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))
        engine.clear()
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        engine.evict(PROMPT, published=False)
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))

    assert (gaps(metrics, "filled"), gaps(metrics, "dropped")) == (1, 0)


async def test_a_store_that_is_away_costs_no_exactness(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineCache(publish())
    flaky = _Flaky(pool)
    async with following(flaky, engine.publisher):
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        flaky.away = True
        engine.evict(PROMPT)
        await until(lambda: flaky.refused > 1)
        engine.evict(PROMPT[:28])
        flaky.away = False
        await until(lambda: is_exactly(pool, engine))


async def test_a_store_that_is_slow_leaves_an_estimate(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(view_writer, "SLOW_CALL_S", -1.0)
    engine = EngineCache(publish())
    engine.store(PROMPT)
    async with following(pool, engine.publisher):
        await until(lambda: _says(pool, "the store took"))
        assert "estimate only pool=default instance=a" in caplog.text
        monkeypatch.setattr(view_writer, "SLOW_CALL_S", 5.0)
        engine.evict(PROMPT)
        await until(lambda: is_exactly(pool, engine))


async def test_events_that_are_ambiguous_leave_an_estimate(
    pool: PoolStore, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineCache(publish())
    engine.store(PROMPT, group_idx=0)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        engine.store(OTHER, group_idx=1, kv_cache_spec_kind="chunked_local_attention")
        await until(lambda: _says(pool, "chunked_local_attention"))

    record = await record_of(pool)
    assert (record.status, record.sequence) == (KvViewStatus.ESTIMATE, None)
    assert (await pool.publications.recent_blocks(("a",), 1000))["a"] == ()
    assert "chunked_local_attention" in caplog.text


async def test_events_of_another_rank_are_refused(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish(rank=1))
    engine.store(PROMPT)
    async with following(pool, engine.publisher, rank=3):
        await until(lambda: _says(pool, "events of rank 1, not of 3"))


async def test_an_instance_that_went_down_is_read_again(pool: PoolStore, publish: Any) -> None:
    engine = EngineCache(publish())
    engine.store(PROMPT)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        await pool.members.set_instance_state("a", InstanceState.DOWN)
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))


async def test_a_cache_that_was_emptied_is_known_to_be_empty_before_the_engine_says_so(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribing, "WAIT_S", 0.05)
    monkeypatch.setattr(subscribing, "TICK_S", 0.05)
    engine = EngineCache(publish())
    engine.store(PROMPT)
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        engine.names.clear()  # as by /reset_prefix_cache, /pause or /sleep: it says so with its next step
        await pool.members.forget_cache("a")
        await until(lambda: is_exactly(pool, engine))

        engine.clear()
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine))


async def test_an_idle_instance_that_went_down_is_known_to_be_empty(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribing, "WAIT_S", 0.05)
    monkeypatch.setattr(subscribing, "TICK_S", 0.05)
    engine = EngineCache(publish())
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        await pool.members.set_instance_state("a", InstanceState.STARTING)
        await until(lambda: is_exactly(pool, engine))


async def test_bookings_that_never_match_stay(pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_writer, "UNMATCHED_BLOCKS", 10)
    engine = EngineCache(publish())
    async with following(pool, engine.publisher):
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine))
        engine.store(OTHER)
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))


async def test_a_batch_that_cannot_be_read_leaves_an_estimate(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribing, "AMBIGUOUS_PAUSE_S", 0.1)
    engine = EngineCache(publish(kept_batches=1))
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        engine.publisher.publish([5], 1.0)  # type: ignore[list-item]
        await until(lambda: _says(pool, "cannot be read"))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))


async def test_an_error_that_no_rule_names_leaves_an_estimate_with_its_name(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscribing, "AMBIGUOUS_PAUSE_S", 0.1)
    engine = EngineCache(publish(kept_batches=1))
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        with monkeypatch.context() as broken:
            broken.setattr(EngineView, "apply", lambda *_: dict[str, int]()["x"])
            engine.publisher.publish([{"type": "AllBlocksCleared"}], 1.0)
            await until(lambda: _says(pool, "KeyError: 'x'"))
        engine.store(PROMPT)
        await until(lambda: is_exactly(pool, engine, KvViewStatus.PARTIAL))

    assert "instance=a" in caplog.text


async def test_a_batch_beyond_all_sizes_leaves_an_estimate(
    pool: PoolStore, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_BATCH_BYTES", 10_000)
    monkeypatch.setattr(sockets, "REPLAY_TIMEOUT_S", 0.2)
    engine = EngineCache(publish())
    async with following(pool, engine.publisher):
        await until(lambda: is_exactly(pool, engine))
        engine.publisher.publish([{"type": "BlockRemoved", "block_hashes": [bytes(32)] * 1000}], 1.0)
        await until(lambda: _says(pool, "does not answer"))


class _Flaky:
    """A pool that can be out of reach."""

    def __init__(self, pool: PoolStore) -> None:
        self._pool = pool
        self.away = False
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pool, name)
        if self.away and (callable(found) or isinstance(found, Changes)):
            self.refused += 1
            raise StoreUnavailableError("away")
        return found


def test_an_address_that_is_none_leaves_no_socket_open() -> None:
    context = zmq.asyncio.Context()
    with pytest.raises(zmq.ZMQError) as failure:
        EventSockets(context, "tcp://no address", None, "kv@")

    assert all(each.closed for each in context._sockets), failure
    context.term()
