"""Two worker processes share the instances out, and the one that lives takes over what the dead one read."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
import yaml

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.emulator.kv_publisher import KvEventPublisher
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.records import unpack_chain
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.support.fork_servers import ForkedCommand, start_command
from tests.support.ports import free_port
from tests.workers.kv_events.engine import EngineCache, until

INSTANCES = tuple("abcdefghijkl")
"""So many that rendezvous hashing gives each of two workers some."""


@pytest.fixture
def port() -> int:
    """The first instance's, which the others' follow; events are replayed 50 further up."""
    places = range(len(INSTANCES))
    return free_port(*places[1:], *(place + 50 for place in places))


@pytest.fixture
async def engines(port: int) -> AsyncIterator[dict[str, EngineCache]]:
    publishers = [
        KvEventPublisher(f"tcp://127.0.0.1:{port + place}", f"tcp://127.0.0.1:{port + place + 50}")
        for place in range(len(INSTANCES))
    ]
    yield {name: EngineCache(publisher) for name, publisher in zip(INSTANCES, publishers, strict=True)}
    for publisher in publishers:
        await publisher.close()


@pytest.fixture
def config(tmp_path: Path, valkey_url: str, port: int) -> Path:
    instances = [{"id": name, "url": f"http://127.0.0.1:{port + place}"} for place, name in enumerate(INSTANCES)]
    events = {"endpoint": "tcp://{host}:{port}", "replay_endpoint": "tcp://{host}:{port+50}"}
    settings = {"store": {"url": valkey_url}, "pools": [{"instances": instances, "kv_events": events}]}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture
def workers(config: Path, tmp_path: Path) -> Iterator[dict[str, ForkedCommand]]:
    started = {
        name: start_command("worker", "--config", str(config), "--name", name, out=tmp_path / f"{name}.log")
        for name in ("first", "second")
    }
    yield started
    for worker in started.values():
        worker.kill()
        worker.wait()


async def test_the_instances_of_a_killed_worker_are_exact_again(
    workers: dict[str, ForkedCommand], valkey_url: str, engines: dict[str, EngineCache]
) -> None:
    store = RedisStore(StoreSettings(url=valkey_url), scheduling=SchedulingSettings())
    await store.open()
    pool, client, keys = store.pool("default"), redis.Redis.from_url(valkey_url), PoolKeys("dualmap", "default")

    def exact(name: str) -> bool:
        held = {unpack_chain(member)[0] for member in client.zrange(keys.kv(name), 0, -1)}
        return held == engines[name].blocks()

    async def owners() -> dict[str, str]:
        return {name: record.owner for name, record in (await pool.kv_events.records()).items()}

    async def shared_out() -> bool:
        found = await owners()
        return len(found) == len(INSTANCES) and len({*found.values()} - {""}) == 2 and "" not in found.values()

    try:
        for number, engine in enumerate(engines.values()):
            engine.store([number, *range(40)])
        await until(shared_out, 60.0)
        await until(lambda: all(map(exact, INSTANCES)), 30.0)
        before = await owners()
        dead = before["a"]
        workers[dead.rpartition("-")[0]].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        for number, engine in enumerate(engines.values()):
            engine.evict(max(engine.names, key=len))
            engine.store([number, *range(20), *range(80, 100)])
        await until(lambda: all(map(exact, INSTANCES)), 30.0)
        print(f"exact again after {time.monotonic() - killed_s:.1f} s")  # the target is 5 s, on a machine of its own
        assert dead not in (await owners()).values()
        assert {record.status.value for record in (await pool.kv_events.records()).values()} == {"exact"}
    finally:
        client.close()
        await store.close()
