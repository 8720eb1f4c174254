"""A worker's share of the instances has subscribers, and no other."""

from __future__ import annotations

import pytest

from dualmap.runtime.pool_settings import InstanceSettings, KvEventSettings, PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.workers.kv_events.job import KvEventsJob
from dualmap.workers.kv_events.source import EventSource, source_of
from tests.workers.contexts import context_of
from tests.workers.kv_events.engine import record_of, until

EVENTS = KvEventSettings(endpoint="tcp://{host}:{port+1}", replay_endpoint="tcp://{host}:{port+2}", topic="kv")
SETTINGS = PoolSettings(kv_events=EVENTS)


@pytest.fixture
async def pool() -> PoolStore:
    pool = MemoryStore(SchedulingSettings()).pool("default")
    await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:1", state=InstanceState.READY))
    return pool


class Silent:
    """No server."""

    async def kv_event_sources(self, url: str) -> None:
        return None


def job(pool: PoolStore, worker_id: str) -> KvEventsJob:
    return KvEventsJob(context_of(pool, settings=SETTINGS, worker_id=worker_id), Silent())


async def owner(pool: PoolStore) -> str:
    return (await record_of(pool)).owner


async def test_one_of_two_workers_reads_an_instance_and_the_other_follows(pool: PoolStore) -> None:
    async with job(pool, "one") as one, job(pool, "two") as two:
        for each in (one, two, one, two):
            await each.tick()
        await until(lambda: owner(pool))
        first = await owner(pool)
        ending, staying = (one, two) if first == "one" else (two, one)
        await ending.__aexit__()
        await staying.tick()
        await until(lambda: owner(pool))

        assert {first, await owner(pool)} == {"one", "two"}


async def test_an_instance_that_leaves_is_read_no_more(pool: PoolStore) -> None:
    async with job(pool, "one") as one:
        await one.tick()
        await until(lambda: owner(pool))
        await pool.members.remove_instance("a")
        await one.tick()
        await pool.members.put_instance(InstanceSpec("a", "http://127.0.0.1:9"))

        assert await owner(pool) == ""


async def test_a_worker_that_ends_gives_its_instances_back(pool: PoolStore) -> None:
    async with job(pool, "one") as one:
        await one.tick()
        await until(lambda: owner(pool))

    assert (await owner(pool), await pool.kv_events.renew_subscriber("two", 1000)) == ("", ["two"])


def test_an_instance_publishes_where_it_or_its_pool_says() -> None:
    own = InstanceSettings(id="b", url="http://b:1", kv_events=KvEventSettings(endpoint="tcp://elsewhere:7"))
    settings = PoolSettings(kv_events=EVENTS, instances=(own,))

    ranked = source_of(InstanceSpec("a", "http://[::1]:30", data_parallel_rank=2), settings)
    other = source_of(InstanceSpec("b", "http://b:1"), settings)

    assert ranked == EventSource("a", "tcp://[::1]:33", "tcp://[::1]:34", "kv", 2)
    assert other == EventSource("b", "tcp://elsewhere:7")
    assert source_of(InstanceSpec("a", "http://a:1"), PoolSettings()) is None
    assert settings.has_kv_events
    assert not PoolSettings().has_kv_events
