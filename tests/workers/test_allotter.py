"""Budgets of tenants with several pools: the parts of all pools are never more than the limit, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.tenants.allotments import KEPT, Division
from dualmap.scheduling.tenants.budgets import Budget, Draw, Draws, Limit, Measure, Period, budget_of, drawn_text
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import StoreError, StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.allotment_ledger import AllotmentLedger
from dualmap.workers import allotter
from dualmap.workers.allotter import Allotter
from tests.support.placements import placement
from tests.workers.contexts import context_of

NAMES = ("a", "b")
DAY = Limit(Measure.REQUESTS, Period.DAY, 80)
SCHEDULING = SchedulingSettings(policy="dualmap")


class Shards:
    """Pools, each of a store of its own, and the ledger of the first one. A call may fail as if its caller died."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        self.stores = stores
        self.away: set[str] = set()
        self.dies_after: int | None = None

    def _check(self, name: str) -> None:
        if name in self.away:
            raise StoreUnavailableError("the store is away")
        if self.dies_after is not None:
            if self.dies_after == 0:
                raise asyncio.CancelledError
            self.dies_after -= 1

    @property
    def allotments(self) -> AllotmentLedger:
        self._check(NAMES[0])
        ledger: AllotmentLedger = self.stores[NAMES[0]].allotments
        return ledger

    def pool(self, name: str) -> PoolStore:
        self._check(name)
        pool: PoolStore = self.stores[name].pool(name)
        return pool

    def allotter(self, name: str) -> Allotter:
        return Allotter(context_of(self.stores[name].pool(name)), self)

    async def parts(self, limit: Limit = DAY) -> dict[str, int]:
        """The part that each pool admits by."""
        begins_with = {name: limit.amount // len(self.stores) for name in self.stores}
        return {
            name: (await store.pool(name).allotments.of(budget_of("acme", limit), limit.amount, begins_with[name])).part
            for name, store in self.stores.items()
        }


_numbers = itertools.count()


async def admitted(shards: Shards, name: str, limit: Limit = DAY, *, most: int = 1, cost: int = 1) -> int:
    """Requests of so many that the limit lets through."""
    place = sorted(shards.stores).index(name)
    division = Division(tuple(sorted(shards.stores)), place, begins=True)
    draws = Draws.of(Draw(Budget(budget_of("acme", limit), limit, division), cost))
    count = 0
    for _ in range(most):
        asked = placement(f"r{next(_numbers)}", "i", tokens=10)
        request = replace(asked.request, tenant="acme", drawn=drawn_text(draws))
        reply = await shards.stores[name].pool(name).place(replace(asked, request=request, draws=draws))
        assert reply.status in (PlaceStatus.DISPATCHED, PlaceStatus.HELD, PlaceStatus.LIMITED)
        count += reply.status is not PlaceStatus.LIMITED
    return count


async def fill(store: Any, name: str) -> None:
    spec = InstanceSpec(
        "i", "http://i", state=InstanceState.READY, max_running_requests=10_000, dispatch_window_tokens=10**9
    )
    await store.pool(name).members.put_instance(spec)


@pytest.fixture
async def shards(clock: Any) -> AsyncIterator[Shards]:
    """Two shards in memory, on one clock."""
    stores = {name: MemoryStore(SCHEDULING, now_ms=clock.now_ms) for name in NAMES}
    for name, store in stores.items():
        await fill(store, name)
    yield Shards(stores)


async def test_unused_budget_comes_to_where_it_is_wanted(shards: Shards) -> None:
    assert await admitted(shards, "a", most=80) == 40

    await shards.allotter("a").tick()

    assert await admitted(shards, "a", most=80) == 40 - 39 // KEPT
    assert await admitted(shards, "b", most=80) == 39 // KEPT


async def test_a_pool_can_use_nearly_all_of_the_limit_and_another_one_gets_back_what_is_left(shards: Shards) -> None:
    used = 0
    for _ in range(6):
        used += await admitted(shards, "a", most=80)
        await shards.allotter("a").tick()
    assert used >= 80 - KEPT

    assert await admitted(shards, "b", most=80) == 80 - used - await left(shards, "a")
    await shards.allotter("b").tick()
    used += await admitted(shards, "a", most=80) + await admitted(shards, "b", most=80)
    assert used <= 80


async def left(shards: Shards, name: str) -> int:
    found = await shards.stores[name].pool(name).allotments.of(budget_of("acme", DAY), DAY.amount, 0)
    return int(found.part - found.used)


async def test_a_request_that_its_part_is_too_small_for_is_admitted_after_a_round(shards: Shards) -> None:
    assert await admitted(shards, "b", cost=80) == 0

    await shards.allotter("b").tick()

    assert await admitted(shards, "b", cost=80) == 1
    assert await admitted(shards, "a") == 0


async def test_of_many_budgets_each_has_its_turn(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allotter, "MOST_IN_A_ROUND", 2)
    limits = [Limit(Measure.REQUESTS, Period.DAY, 8, f"key:{number}") for number in range(5)]
    keeper = shards.allotter("a")
    for _ in range(3):
        for limit in limits:
            await admitted(shards, "a", limit, most=8)
        await keeper.tick()

    assert all([(await shards.parts(limit))["a"] > 4 for limit in limits])


async def test_budgets_that_leak_move_with_their_rate(shards: Shards, clock: Any) -> None:
    minute = Limit(Measure.REQUESTS, Period.MINUTE, 60)
    count = 0
    for _ in range(120):
        count += await admitted(shards, "a", minute, most=60)
        await shards.allotter("a").tick()
        await clock.advance(1.0)

    assert 60 + 120 * (1 - 1 / KEPT) - 10 <= count <= 60 + 120


async def test_the_sum_of_parts_is_never_above_the_limit_wherever_a_leader_dies(shards: Shards) -> None:
    used = await admitted(shards, "a", most=40)
    for step in itertools.count():
        shards.dies_after = step
        with contextlib.suppress(asyncio.CancelledError):
            await shards.allotter("a").tick()
        is_over, shards.dies_after = shards.dies_after > 0, None
        assert sum((await shards.parts()).values()) <= DAY.amount
        used += await admitted(shards, "a", most=5) + await admitted(shards, "b", most=1)
        assert used <= DAY.amount
        if is_over:
            break
    assert step > 5, "it died at several steps"

    for _ in range(8):
        for name in NAMES:
            await shards.allotter(name).tick()
            used += await admitted(shards, name, most=80)
    assert used == DAY.amount


async def test_a_leader_that_was_overtaken_gives_nothing_that_a_later_one_took(shards: Shards) -> None:
    await admitted(shards, "a", most=40)
    slow, ledger = shards.allotter("a"), shards.stores["a"].allotments
    paused, goes_on = asyncio.Event(), asyncio.Event()
    pool = shards.stores["a"].pool("a").allotments
    allot = pool.allot

    async def give(change: Any) -> Any:
        if change.part > 40 and not paused.is_set():
            paused.set()
            await goes_on.wait()
        return await allot(change)

    pool.allot = give
    round_of_slow = asyncio.create_task(slow.tick())
    await paused.wait()
    stamp = (await ledger.entry(budget_of("acme", DAY))).stamp
    await admitted(shards, "b", most=10)
    await shards.allotter("b").tick()
    assert (await ledger.entry(budget_of("acme", DAY))).stamp > stamp

    goes_on.set()
    await round_of_slow

    entry = await ledger.entry(budget_of("acme", DAY))
    assert await shards.parts() == entry.parts
    assert sum(entry.parts.values()) == DAY.amount


async def test_a_pool_that_is_away_keeps_what_it_had(shards: Shards) -> None:
    await admitted(shards, "a", most=40)
    await shards.allotter("a").tick()
    before = await shards.parts()
    shards.away.add("b")

    await admitted(shards, "a", most=80)
    await shards.allotter("a").tick()

    assert await shards.parts() == before
    shards.away.clear()
    await admitted(shards, "a")
    await shards.allotter("a").tick()
    assert await shards.parts() != before


async def test_a_pool_that_lost_its_parts_gets_what_the_ledger_says_and_never_more(shards: Shards) -> None:
    await admitted(shards, "a", most=40)
    await shards.allotter("a").tick()
    of_b = (await shards.parts())["b"]
    shards.stores["b"].server.contents.clear()
    await fill(shards.stores["b"], "b")

    await admitted(shards, "b")  # by an equal part, until the next round
    await shards.allotter("b").tick()

    parts = await shards.parts()
    assert of_b < parts["b"] < 40
    assert sum(parts.values()) == DAY.amount


async def test_a_pool_that_comes_back_as_it_was_is_taken_back_to_the_ledger(shards: Shards) -> None:
    await admitted(shards, "a")
    await admitted(shards, "b")
    keeper = shards.allotter("b")
    await keeper.tick()
    kept = {key: dict(each) if isinstance(each, dict) else each for key, each in contents(shards, "b").items()}
    await admitted(shards, "a", most=80)
    await shards.allotter("a").tick()
    await keeper.tick()
    contents(shards, "b").update(kept)
    assert sum((await shards.parts()).values()) > DAY.amount

    await keeper.tick()

    assert sum((await shards.parts()).values()) == DAY.amount


def contents(shards: Shards, name: str) -> dict[bytes, Any]:
    found: dict[bytes, Any] = shards.stores[name].server.contents
    return found


async def test_a_ledger_that_was_lost_is_made_of_what_the_pools_have(shards: Shards) -> None:
    await admitted(shards, "a", most=40)
    await shards.allotter("a").tick()
    contents(shards, "a").pop(b"dualmap:{fleet}:tenants:allotments")
    shards.away.add("b")
    await admitted(shards, "a", most=80)
    with contextlib.suppress(StoreError):
        await shards.allotter("a").tick()
    assert sum((await shards.parts()).values()) == DAY.amount, "the parts are not known without all pools"

    shards.away.clear()
    await shards.allotter("a").tick()

    entry = await shards.allotments.entry(budget_of("acme", DAY))
    assert await shards.parts() == entry.parts
    assert sum(entry.parts.values()) == DAY.amount


async def test_a_limit_that_is_changed_is_divided_again(shards: Shards) -> None:
    await admitted(shards, "a", most=40)
    await shards.allotter("a").tick()
    for amount in (20, 200):
        changed = Limit(Measure.REQUESTS, Period.DAY, amount)
        assert sum((await shards.parts(changed)).values()) <= amount
        await admitted(shards, "a", changed)
        await shards.allotter("a").tick()
        assert sum((await shards.parts(changed)).values()) <= amount
    assert await admitted(shards, "a", changed, most=200) > 100


@pytest.fixture
def valkeys() -> Any:
    """Two servers."""
    with EmbeddedValkey() as first, EmbeddedValkey() as second:
        yield dict(zip(NAMES, (first, second), strict=True))


@pytest.fixture
async def real_shards(valkeys: dict[str, EmbeddedValkey]) -> AsyncIterator[Shards]:
    """Two shards on servers of their own."""
    stores = {
        name: RedisStore(StoreSettings(url=server.url, command_timeout_s=2.0), scheduling=SCHEDULING)
        for name, server in valkeys.items()
    }
    for name, store in stores.items():
        await store.open()
        await fill(store, name)
    yield Shards(stores)
    for store in stores.values():
        await store.close()


async def test_two_servers_admit_the_limit_and_no_more_while_leaders_are_killed(real_shards: Shards) -> None:
    shards, rng, used = real_shards, random.Random(5), 0
    limit = Limit(Measure.REQUESTS, Period.DAY, 300)

    async def client(name: str) -> int:
        count = 0
        for _ in range(150):
            count += await admitted(shards, name, limit, most=rng.randrange(1, 4))
        return count

    async def leaders(done: Callable[[], bool]) -> None:
        while not done():
            rounds = [asyncio.create_task(shards.allotter(rng.choice(NAMES)).tick()) for _ in range(2)]
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                rounds[0].cancel()
            await asyncio.gather(*rounds, return_exceptions=True)
            assert sum((await shards.parts(limit)).values()) <= limit.amount

    clients = [asyncio.create_task(client(name)) for name in ("a", "a", "b")]
    await leaders(lambda: all(each.done() for each in clients))
    used = sum([await each for each in clients])
    assert used <= limit.amount

    async with asyncio.timeout(60):
        while used < limit.amount:
            for name in NAMES:
                used += await admitted(shards, name, limit, most=10)
                await shards.allotter(name).tick()
    assert used == limit.amount, "and all of it can be used"


async def test_after_the_death_of_a_server_the_books_agree_again(
    real_shards: Shards, valkeys: dict[str, EmbeddedValkey]
) -> None:
    shards, rounds = real_shards, {name: real_shards.allotter(name) for name in NAMES}
    await admitted(shards, "b", most=35)
    await rounds["b"].tick()
    ledger_before = await shards.allotments.entry(budget_of("acme", DAY))
    os.kill(valkeys["b"].server_pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while valkeys["b"].running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    of_a = await admitted(shards, "a", most=80)
    await rounds["a"].tick()
    entry = await shards.allotments.entry(budget_of("acme", DAY))
    assert of_a + await admitted(shards, "a", most=80) == entry.parts["a"] == ledger_before.parts["a"]
    assert entry.parts["b"] == ledger_before.parts["b"], "a server that is away keeps what it had"

    port = int(valkeys["b"].url.rpartition(":")[2].partition("/")[0])
    with EmbeddedValkey(port=port):
        async with asyncio.timeout(30):
            while True:
                try:
                    await fill(shards.stores["b"], "b")
                    break
                except StoreError:
                    await asyncio.sleep(0.02)
        await admitted(shards, "b")
        await rounds["b"].tick()
        entry = await shards.allotments.entry(budget_of("acme", DAY))
        assert await shards.parts() == entry.parts
        assert sum(entry.parts.values()) == DAY.amount
