"""The leader makes instances have the adapters that they should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from dualmap.runtime.engine_adapters import EngineAdapters
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.registered_adapters import AdapterState, RegisteredAdapter
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from dualmap.workers import adapter_keeper
from dualmap.workers.adapter_keeper import FIRST_PAUSE_S, PREPARES_S, AdapterKeeper
from dualmap.workers.context import LeaderContext
from tests.statestore.samples import finish, place
from tests.support.adapter_servers import AdapterServers
from tests.support.manual_clock import ManualClock, settle

Keep = Callable[[], Awaitable[None]]


@pytest.fixture(autouse=True)
def acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_keeper, "LEFT_MS", 0)


@pytest.fixture
def servers() -> AdapterServers:
    made = AdapterServers()
    made.add(*"abcd")
    return made


@pytest.fixture
async def keeper(leading: LeaderContext, servers: AdapterServers) -> AsyncIterator[AdapterKeeper]:
    async with AdapterKeeper(leading, EngineAdapters(transport=servers)) as made:
        yield made


@pytest.fixture
def keep(keeper: AdapterKeeper) -> Keep:
    """Rounds, each through to the end of its calls, until nothing is due."""

    async def rounds() -> None:
        for _ in range(20):
            await keeper.tick()
            under_way = [*keeper._under_way.values()]
            if not under_way:
                return
            await asyncio.wait(under_way, timeout=30)
        raise AssertionError("it never ends")

    return rounds


async def enter(pool: PoolStore, names: str, **more: object) -> None:
    for name in names:
        spec = InstanceSpec(name, f"http://{name}.test:8000", state=InstanceState.READY, models={"default": ""})
        await pool.members.put_instance(replace(spec, **more))


async def register(pool: PoolStore, name: str = "sql", **more: object) -> None:
    adapter = replace(RegisteredAdapter(f"/adapters/{name}"), **more)
    await pool.adapters.change(name, lambda former, known: adapter)


def having(servers: AdapterServers, name: str = "sql") -> set[str]:
    return {instance_id for instance_id, each in servers.of.items() if name in each.adapters}


async def test_a_pool_without_adapters_is_left_alone(keep: Keep, pool: PoolStore, servers: AdapterServers) -> None:
    await enter(pool, "ab")

    await keep()

    assert not any(each.calls for each in servers.of.values())


async def test_a_registered_adapter_is_loaded_on_its_homes_and_the_store_knows(
    keep: Keep, pool: PoolStore, servers: AdapterServers
) -> None:
    await enter(pool, "abcd")
    await register(pool)

    await keep()

    homes = having(servers)
    specs = (await pool.membership()).instances
    assert len(homes) == 2
    assert {name for name, spec in specs.items() if spec.adapters == {"sql": "/adapters/sql"}} == homes


async def test_a_home_that_dies_is_followed_by_another_one_and_a_new_process_gets_what_it_lacks(
    keep: Keep, pool: PoolStore, servers: AdapterServers
) -> None:
    await enter(pool, "abcd")
    await register(pool)
    await keep()
    former = having(servers)
    dead = min(former)
    servers.of[dead].adapters.clear()
    await pool.members.set_instance_state(dead, InstanceState.DOWN)
    await keep()
    meanwhile = having(servers)
    await pool.members.set_instance_state(dead, InstanceState.READY)
    await pool.members.update_instance(dead, {"models": {"default": ""}, "adapters": None})

    await keep()

    assert len(meanwhile) == 2
    assert dead not in meanwhile
    assert having(servers) == former | meanwhile


async def test_an_instance_that_was_away_gets_new_weights_and_gives_up_what_was_unloaded(
    keep: Keep, pool: PoolStore, servers: AdapterServers
) -> None:
    await enter(pool, "ab", models={"default": "", "sql": "default", "chat": "default"})
    for name in "ab":
        held = {"sql": "/adapters/sql", "chat": "/adapters/chat"}
        servers.of[name].adapters = dict(held)
        await pool.members.update_instance(name, {"adapters": held})
    await register(pool, generation=1)
    await register(pool, "chat", state=AdapterState.UNLOADED)

    await keep()

    assert [servers.of[name].adapters for name in "ab"] == [{"sql": "/adapters/sql/."}] * 2


async def test_an_instance_with_little_room_gets_the_adapters_that_are_used(
    keep: Keep, pool: PoolStore, servers: AdapterServers, clock: ManualClock
) -> None:
    await enter(pool, "a", adapter_slots=1, adapter_host_slots=2)
    for name in ("one", "two", "three"):
        await register(pool, name)
    for name in ("three", "one"):
        clock.jump(1.0)
        await place(pool, name, adapter=name)
        await finish(pool, name)

    await keep()

    assert {*servers.of["a"].adapters} == {"one", "three"}


async def test_a_load_that_fails_is_noted_tried_again_ever_later_and_ends_with_the_adapter(
    keep: Keep, pool: PoolStore, servers: AdapterServers, clock: ManualClock
) -> None:
    await enter(pool, "a")
    await register(pool)
    servers.of["a"].missing = frozenset({"/adapters/sql"})
    await keep()
    noted = await pool.adapters.failures()
    await keep()
    assert len(servers.of["a"].calls) == 1
    clock.jump(FIRST_PAUSE_S)
    await keep()
    clock.jump(FIRST_PAUSE_S)
    await keep()

    assert "No adapter found" in noted["a", "sql"].text
    assert len(servers.of["a"].calls) == 2
    await register(pool, state=AdapterState.UNLOADED)
    await keep()
    assert await pool.adapters.failures() == {}


async def test_a_failure_that_is_over_is_noted_no_more(
    keep: Keep, pool: PoolStore, servers: AdapterServers, clock: ManualClock
) -> None:
    await enter(pool, "a")
    await register(pool)
    servers.of["a"].away = True
    await keep()
    servers.of["a"].away = False
    clock.jump(FIRST_PAUSE_S)

    await keep()

    assert having(servers) == {"a"}
    assert await pool.adapters.failures() == {}


async def test_an_adapter_that_was_just_registered_is_left_to_who_did_that(
    keep: Keep, pool: PoolStore, servers: AdapterServers, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_keeper, "LEFT_MS", 3000)
    await enter(pool, "a")
    await register(pool)
    await keep()
    assert not servers.of["a"].calls
    clock.jump(3.0)

    await keep()

    assert having(servers) == {"a"}


async def test_an_instance_that_could_serve_loads_what_it_should_have_before(
    keeper: AdapterKeeper, keep: Keep, pool: PoolStore, servers: AdapterServers
) -> None:
    await enter(pool, "abc")
    await enter(pool, "d", state=InstanceState.STARTING)
    for number in range(12):
        await register(pool, f"adapter-{number}")
    await keep()
    arriving = (await pool.membership()).instances["d"]
    assert not servers.of["d"].adapters

    answers = [keeper.is_prepared(arriving) for _ in range(2)]
    await keep()
    answers.append(keeper.is_prepared(arriving))

    assert answers == [False, False, True]
    assert servers.of["d"].adapters


async def test_an_instance_does_not_wait_for_ever_nor_where_no_other_serves(
    keeper: AdapterKeeper, keep: Keep, pool: PoolStore, servers: AdapterServers, clock: ManualClock
) -> None:
    await enter(pool, "d", state=InstanceState.STARTING)
    await register(pool)
    await keep()
    alone = keeper.is_prepared((await pool.membership()).instances["d"])
    await enter(pool, "a")
    servers.of["d"].goes = asyncio.Event()
    await keep()
    arriving = (await pool.membership()).instances["d"]
    waiting = [keeper.is_prepared(arriving) for _ in range(2)]
    await keeper.tick()
    clock.jump(PREPARES_S)

    assert (alone, waiting) == (True, [False, False])
    assert keeper.is_prepared(arriving)


async def test_one_server_loads_one_adapter_at_a_time(
    keeper: AdapterKeeper, pool: PoolStore, servers: AdapterServers
) -> None:
    await enter(pool, "a")
    servers.of["a"].goes = asyncio.Event()
    for name in ("one", "two"):
        await register(pool, name)

    for _ in range(3):
        await keeper.tick()
        await settle()

    assert len(servers.of["a"].calls) == 1


async def test_a_leader_that_was_deposed_writes_nothing(
    keeper: AdapterKeeper, pool: PoolStore, servers: AdapterServers, clock: ManualClock
) -> None:
    await enter(pool, "a")
    await register(pool)
    clock.jump(20_000.0)
    assert await pool.leader_lease.acquire("another", 60_000) is not None

    await keeper.tick()
    await asyncio.wait([*keeper._under_way.values()], timeout=30)
    with pytest.raises(LeaseLostError):
        await keeper.tick()

    assert (await pool.membership()).instances["a"].adapters is None
