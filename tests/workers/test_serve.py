"""Real worker processes on a real Valkey: killed, stopped, suspended, and without their store."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import LeaseLostError, StoreConfigurationError, StoreSchemaError, StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.schema import SCHEMA
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.serve import serve
from dualmap.workers.settings import WorkerSettings
from tests.support.fork_servers import ForkedCommand, start_program
from tests.support.placements import placement
from tests.workers.scripted_server import ScriptedServer

_WORKER = """
import asyncio, json, logging, sys
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.serve import serve
from dualmap.workers.settings import WorkerSettings
logging.basicConfig(level=logging.INFO)
given = json.loads(sys.argv[1])
scheduling = SchedulingSettings(policy="dualmap", time_scale=5.0)
asyncio.run(serve(WorkerSettings(**given["worker"]), scheduling, StoreSettings(url=given["url"]),
                  [PoolSettings(**given["pool"])], worker_id=given["id"]))
"""
HELD = StoredRequest(
    "r1",
    "router-1",
    "a",
    RequestState.HELD,
    1,
    uncached_tokens=1000,
    prompt_tokens=1000,
    expected_output_tokens=64,
    slo_ms=5000,
)
_QUICK = {"lease_s": 0.9, "health_interval_s": 0.1}


class WorkerProcess:
    """One ``serve`` in a process of its own."""

    def __init__(self, worker_id: str, process: ForkedCommand, log: Path) -> None:
        self.worker_id = worker_id
        self.process = process
        self.log = log

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


StartWorker = Callable[..., Awaitable[WorkerProcess]]


@pytest.fixture
async def start_worker(tmp_path: Path) -> AsyncIterator[StartWorker]:
    """``worker = await start_worker("w1", url, [instances], lease_s=…)``; killed after the test."""
    started: list[WorkerProcess] = []

    async def start(
        worker_id: str, url: str, instances: tuple[InstanceSettings, ...] = (), **changes: Any
    ) -> WorkerProcess:
        pool = PoolSettings(instances=instances).model_dump(mode="json")
        given = {"worker": _QUICK | changes, "url": url, "pool": pool, "id": worker_id}
        log = tmp_path / f"{worker_id}.log"
        process = start_program(_WORKER, json.dumps(given), out=log)
        started.append(WorkerProcess(worker_id, process, log))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        await asyncio.to_thread(worker.process.wait)
        print(f"{worker.worker_id} ended with {worker.process.returncode}:\n{worker.log.read_text()}")


@pytest.fixture
async def fleet(valkey_url: str) -> AsyncIterator[PoolStore]:
    store = await open_store(StoreSettings(url=valkey_url), scheduling=SchedulingSettings(policy="dualmap"))
    yield store.pool("default")
    await store.close()


def leader_of(pool: PoolStore, *, but: str = "") -> Callable[[], Awaitable[Lease | None]]:
    async def read() -> Lease | None:
        try:
            leader = (await pool.snapshot()).leader
        except StoreUnavailableError:
            return None
        return leader if leader is not None and leader.owner != but else None

    return read


async def test_a_killed_leader_is_replaced_and_what_it_would_write_is_refused(
    valkey_url: str, fleet: PoolStore, start_worker: StartWorker, eventually: Callable[..., Awaitable[Any]]
) -> None:
    # given two workers of which one leads a pool with an instance
    instances = (InstanceSettings(id="a", url="http://127.0.0.1:9"),)
    workers = {name: await start_worker(name, valkey_url, instances) for name in ("w1", "w2")}
    first = await eventually(leader_of(fleet))

    # when the leader dies without a word
    workers[first.owner].signal(signal.SIGKILL)

    # then the other one leads, under a higher fence, and the old one is worth nothing
    second = await eventually(leader_of(fleet, but=first.owner))
    assert second.fence > first.fence
    refused = [
        fleet.leader_lease.renew(first, 600),
        fleet.members.set_instance_state("a", InstanceState.READY, fence=first.fence),
        fleet.publications.publish_tree(HotnessTree({1: 1}), {1: 1}, fence=first.fence),
        fleet.queues.migrate(HELD, "b", reason="test", fence=first.fence),
        fleet.publications.publish_learned(Learned(), {}, fence=first.fence),
        fleet.upkeep.reap("router-1", fence=first.fence),
    ]
    for write in refused:
        with pytest.raises(LeaseLostError):
            await write
    assert (await fleet.membership()).tree_version == 0


async def test_sigterm_hands_the_leadership_over_long_before_the_lease_ends(
    valkey_url: str, fleet: PoolStore, start_worker: StartWorker, eventually: Callable[..., Awaitable[Any]]
) -> None:
    first = await start_worker("w1", valkey_url, lease_s=60.0)
    await eventually(leader_of(fleet))
    second = await start_worker("w2", valkey_url)

    first.signal(signal.SIGTERM)

    assert await first.exit_code() == 0
    assert (await eventually(leader_of(fleet, but="w1"))).owner == second.worker_id
    assert "lease released" in first.log.read_text()


async def test_a_suspended_leader_finds_itself_deposed_when_it_wakes(
    valkey_url: str, fleet: PoolStore, start_worker: StartWorker, eventually: Callable[..., Awaitable[Any]]
) -> None:
    workers = {name: await start_worker(name, valkey_url) for name in ("w1", "w2")}
    first = await eventually(leader_of(fleet))
    old = workers[first.owner]
    await eventually(lambda: "elected" in old.log.read_text())  # the store knows of a new leader before it does

    old.signal(signal.SIGSTOP)
    second = await eventually(leader_of(fleet, but=first.owner))
    old.signal(signal.SIGCONT)

    await eventually(lambda: "term over" in old.log.read_text())
    assert (await fleet.snapshot()).leader.owner == second.owner
    assert "Traceback" not in old.log.read_text()


async def test_the_leader_brings_instances_up_and_moves_requests_off_a_dead_one(
    valkey_url: str,
    fleet: PoolStore,
    start_worker: StartWorker,
    eventually: Callable[..., Awaitable[Any]],
    servers: Callable[[], Awaitable[ScriptedServer]],
) -> None:
    first, second = await servers(), await servers()
    instances = (
        InstanceSettings(id="a", url=first.url, dispatch_window_tokens=10),
        InstanceSettings(id="b", url=second.url),
    )
    await start_worker("w1", valkey_url, instances)

    async def states() -> list[InstanceState]:
        return [spec.state for spec in (await fleet.membership()).instances.values()]

    async def all_ready() -> bool:
        return await states() == [InstanceState.READY] * 2

    await eventually(all_ready)
    await fleet.heartbeat("router-1", 60_000, {})
    for name in ("running", "held"):
        await fleet.place(placement(name, "a", replica_id="router-1"))

    await first.stop()

    async def moved() -> bool:
        return (await fleet.records(["held"]))["held"].instance_id == "b"

    await eventually(moved)
    assert InstanceState.DOWN in await states()
    assert (await fleet.snapshot()).migrations == {"instance_down": 1}


async def test_the_leader_rebalances_an_overload_and_reaps_the_replica_that_caused_it(
    valkey_url: str,
    fleet: PoolStore,
    start_worker: StartWorker,
    eventually: Callable[..., Awaitable[Any]],
    servers: Callable[[], Awaitable[ScriptedServer]],
) -> None:
    # given a hotspot, put there by a replica that then dies
    urls = [(await servers()).url, (await servers()).url]
    instances = tuple(
        InstanceSettings(id=name, url=url, prefill_tokens_per_s=1000.0, dispatch_window_tokens=2000)
        for name, url in zip("ab", urls, strict=True)
    )
    await start_worker("w1", valkey_url, instances)

    async def all_ready() -> bool:
        specs = (await fleet.membership()).instances.values()
        return [spec.state for spec in specs] == [InstanceState.READY] * 2

    await eventually(all_ready)
    await fleet.heartbeat("router-1", 1_500, {})
    for number in range(8):
        await fleet.place(placement(f"r{number}", "a", other="b", overloaded=number == 7, replica_id="router-1"))

    async def migrated() -> bool:
        return (await fleet.snapshot()).migrations.get("rebalance", 0) >= 3

    await eventually(migrated)

    async def nothing_left() -> bool:
        snapshot = await fleet.snapshot()
        return not snapshot.requests and not snapshot.replicas

    await eventually(nothing_left)
    assert all(load.pending_tokens == 0 for load in (await fleet.loads()).values())


async def test_workers_survive_a_store_that_vanishes_and_comes_back_empty(
    tmp_path: Path,
    start_worker: StartWorker,
    eventually: Callable[..., Awaitable[Any]],
    servers: Callable[[], Awaitable[ScriptedServer]],
) -> None:
    # given a worker that leads a fleet of one
    socket = tmp_path / "store.sock"
    server = EmbeddedValkey(unix_socket=socket)
    server.start()
    worker = await start_worker("w1", server.url, (InstanceSettings(id="a", url=(await servers()).url),))
    store = await open_store(StoreSettings(url=server.url), scheduling=SchedulingSettings(policy="dualmap"))
    pool = store.pool("default")

    async def led_and_ready() -> bool:
        try:
            snapshot = await pool.snapshot()
        except StoreUnavailableError:
            return False
        a = snapshot.instances.get("a")
        return snapshot.leader is not None and a is not None and a.state is InstanceState.READY

    try:
        await eventually(led_and_ready)

        # when the store goes, stays away longer than the lease, and comes back knowing nothing
        await asyncio.to_thread(server.stop)
        await eventually(lambda: "term over" in worker.log.read_text())
        server = EmbeddedValkey(unix_socket=socket)
        server.start()

        # then the same process leads again and the instance is known again
        await eventually(led_and_ready)
        assert worker.process.poll() is None
        assert "cause=restored" in worker.log.read_text()
    finally:
        await store.close()
        await asyncio.to_thread(server.stop)


async def test_a_worker_waits_for_a_store_that_is_not_there_yet(
    tmp_path: Path, start_worker: StartWorker, eventually: Callable[..., Awaitable[Any]]
) -> None:
    socket = tmp_path / "late.sock"
    server = EmbeddedValkey(unix_socket=socket)
    server.start()
    url = server.url
    await asyncio.to_thread(server.stop)
    worker = await start_worker("w1", url)
    await eventually(lambda: "waiting for the store" in worker.log.read_text())

    server = EmbeddedValkey(unix_socket=socket)
    server.start()

    try:
        await eventually(lambda: "elected" in worker.log.read_text())
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_store_that_no_router_can_see_stops_the_start() -> None:
    with pytest.raises(StoreConfigurationError, match=r"store\.url memory:// is seen by one process only"):
        await serve(WorkerSettings(), SchedulingSettings(), StoreSettings(url="memory://"), [PoolSettings()])


async def test_a_pool_that_a_newer_version_uses_stops_the_start() -> None:
    server = EmbeddedValkey()
    await asyncio.to_thread(server.start)
    try:
        settings, pools = StoreSettings(url=server.url), [PoolSettings()]
        with redis.Redis.from_url(server.url) as client:
            client.hset(
                PoolKeys("dualmap", "default").meta, mapping={"schema": SCHEMA + 1, "oldest_schema": SCHEMA + 1}
            )
            before = client.dbsize()

            with pytest.raises(StoreSchemaError, match=r"give this one another store\.prefix"):
                await serve(WorkerSettings(), SchedulingSettings(), settings, pools)

            assert client.dbsize() == before
    finally:
        await asyncio.to_thread(server.stop)
