"""The published tree follows the traffic, across changes of leader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.learning_jobs import HotnessJob
from tests.statestore.samples import finish
from tests.support.manual_clock import ManualClock
from tests.workers.doing import AddInstance, Reserve
from tests.workers.flaky_pool import FlakyPool

HOT, COLD_BASE = 0xAAAA, 1_000


KeeperOf = Callable[..., HotnessJob]


@pytest.fixture
def keeper_of(leading: LeaderContext) -> KeeperOf:
    def make(pool: Any, **changes: Any) -> HotnessJob:
        settings = SchedulingSettings(time_scale=2.0, **changes)  # a window of 60 s
        return HotnessJob(replace(leading, pool=pool), settings)

    return make


@pytest.fixture
def published(pool: PoolStore, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The counts of every tree that is published."""
    counts_of = []
    publish = pool.publications.publish_tree

    async def noted(tree: Any, counts: Any, *, fence: int) -> int:
        counts_of.append(dict(counts))
        return await publish(tree, counts, fence=fence)

    monkeypatch.setattr(pool.publications, "publish_tree", noted)
    return counts_of


Traffic = Callable[[int, float], Awaitable[None]]


@pytest.fixture
async def traffic(pool: PoolStore, add_instance: AddInstance, reserve: Reserve) -> Traffic:
    """``await traffic(n, hot_share)``: n finished requests, a share of them with one common first block."""
    for number in range(8):
        await add_instance(f"i{number}")
    count = 0

    async def send(requests: int, hot_share: float) -> None:
        nonlocal count
        for number in range(requests):
            count += 1
            first = HOT if number < requests * hot_share else COLD_BASE + count
            await reserve(f"r{count}", f"i{count % 8}", 256, hashes=(first, 10_000_000 + count))
            await finish(pool, f"r{count}")

    return send


async def test_a_popular_prefix_becomes_hot_and_cools_again(
    pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic, clock: ManualClock, value: Callable[..., float]
) -> None:
    keeper = keeper_of(pool)

    await traffic(100, 0.4)  # 2 / n = 0.25
    await keeper.tick()
    hot = await pool.membership()
    assert dict(hot.tree.hot) == {HOT: 1}
    assert value("dualmap_worker_hot_prefixes") == 1

    clock.jump(61)
    await traffic(100, 0.05)  # 1 / n = 0.125
    await keeper.tick()
    assert dict((await pool.membership()).tree.hot) == {}
    assert (await pool.membership()).tree_version > hot.tree_version


async def test_the_tree_is_published_only_when_it_changes(
    pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic, value: Callable[..., float]
) -> None:
    keeper = keeper_of(pool)
    for _ in range(5):
        await traffic(50, 0.5)
        await keeper.tick()

    assert (await pool.membership()).tree_version == 1
    assert value("dualmap_worker_trees_published_total") == 1


async def test_counts_of_an_unchanged_tree_are_renewed_now_and_then(
    pool: PoolStore,
    keeper_of: KeeperOf,
    traffic: Traffic,
    clock: ManualClock,
    value: Callable[..., float],
    published: list[dict[int, int]],
) -> None:
    keeper = keeper_of(pool)

    await traffic(60, 0.5)
    await keeper.tick()
    assert published == [{HOT: 30}]

    await traffic(60, 0.5)
    clock.jump(4)
    await keeper.tick()
    assert len(published) == 1, "not yet"
    clock.jump(1)
    await keeper.tick()
    assert published[1:] == [{HOT: 60}]

    assert (await pool.membership()).tree_version == value("dualmap_worker_trees_published_total") == 1


async def test_counts_that_stay_the_same_are_not_written_again(
    flaky: FlakyPool, keeper_of: KeeperOf, traffic: Traffic, clock: ManualClock
) -> None:
    keeper = keeper_of(flaky)
    await traffic(100, 0.5)
    for _ in range(5):
        await keeper.tick()
        clock.jump(5)

    assert flaky.calls.count("publish_tree") == 1


async def test_counts_are_right_again_soon_after_a_change_of_leader(
    pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic, published: list[dict[int, int]]
) -> None:
    await traffic(60, 0.5)
    await keeper_of(pool).tick()
    await traffic(60, 0.5)

    await keeper_of(pool).tick()

    assert published[-1] == {HOT: 60}


async def test_in_the_band_between_hot_and_cold_nothing_changes(
    pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic, clock: ManualClock
) -> None:
    keeper = keeper_of(pool)
    await traffic(100, 0.2)
    await keeper.tick()
    assert dict((await pool.membership()).tree.hot) == {}

    await traffic(100, 0.9)
    await keeper.tick()
    clock.jump(61)
    await traffic(100, 0.2)
    await keeper.tick()
    assert dict((await pool.membership()).tree.hot) == {HOT: 1}


async def test_a_new_leader_knows_what_the_former_one_knew(
    pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic
) -> None:
    # given traffic that the former leader saw, longer than one read of the log
    await traffic(1100, 0.4)
    await traffic(100, 0.4)
    await keeper_of(pool).tick()
    former = await pool.membership()

    # when a new keeper takes over, with no request in between
    successor = keeper_of(pool)
    await successor.tick()

    assert (await pool.membership()).tree_version == former.tree_version, "the same tree, not published again"
    await traffic(10, 0.0)
    await successor.tick()
    assert dict((await pool.membership()).tree.hot) == {HOT: 1}, "and the same window"


async def test_without_enough_traffic_nothing_is_hot(pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic) -> None:
    await traffic(15, 1.0)

    await keeper_of(pool).tick()

    assert (await pool.membership()).tree_version == 0


async def test_a_deposed_keeper_publishes_nothing(
    pool: PoolStore, keeper_of: KeeperOf, traffic: Traffic, clock: ManualClock
) -> None:
    await traffic(100, 0.5)
    keeper = keeper_of(pool)
    clock.jump(20_000.0)

    with pytest.raises(LeaseLostError):
        await keeper.tick()

    assert (await pool.membership()).tree_version == 0
