"""The job that moves rollouts by what replicas report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dualmap.scheduling.revisions.figures import Figures, Moments, figures_text
from dualmap.scheduling.revisions.gate import Bounds
from dualmap.scheduling.revisions.rollout import Move, Rollout, RolloutState, begun
from dualmap.scheduling.revisions.weights import RevisionWeights, with_weights
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.leases import REVISIONS_FIELD
from dualmap.statestore.pool import PoolStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.rollout_keeper import RolloutKeeper


def figures(count: int, failed: int = 0) -> Figures:
    times = Moments(count, 0.0, 0.25 * count)
    return Figures(count, failed, count, 0, count, 0, ttft=times, tpot=times)


@pytest.fixture
async def started(pool: PoolStore) -> None:
    def start(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move:
        return begun("v2", (5.0, 50.0, 100.0), Bounds(), RevisionWeights.alone("v1"), now_ms)

    await pool.revisions.conduct(start, by="ada")


async def reported(pool: PoolStore, replica: str, version: int | None = None, **by_revision: Figures) -> None:
    """The heartbeat of a replica with the sums that it has counted so far."""
    version = (await pool.revisions.weights()).version if version is None else version
    await pool.heartbeat(replica, 60_000, {REVISIONS_FIELD: figures_text(version, by_revision)})


async def current(pool: PoolStore) -> Rollout:
    rollout = await pool.revisions.rollout()
    assert rollout is not None
    return rollout


async def counted(pool: PoolStore) -> dict[str, int]:
    return {name: each.requests for name, each in (await current(pool)).figures.items()}


async def test_what_replicas_counted_is_added_up_once(pool: PoolStore, started: None, leading: LeaderContext) -> None:
    keeper = RolloutKeeper(leading)

    await reported(pool, "one", v1=figures(20), v2=figures(2))
    await keeper.tick()
    await reported(pool, "one", v1=figures(30), v2=figures(2))
    await reported(pool, "two", v2=figures(1))
    await keeper.tick()
    await keeper.tick()

    assert await counted(pool) == {"v1": 30, "v2": 3}


async def test_a_replica_that_began_again_adds_to_what_it_had(
    pool: PoolStore, started: None, leading: LeaderContext
) -> None:
    keeper = RolloutKeeper(leading)
    await reported(pool, "one", v1=figures(20))
    await keeper.tick()

    await reported(pool, "one", v1=figures(5))
    await keeper.tick()

    assert await counted(pool) == {"v1": 25}


async def test_another_leader_goes_on_from_what_was_added_up(
    pool: PoolStore, started: None, leading: LeaderContext
) -> None:
    await reported(pool, "one", v1=figures(20))
    await RolloutKeeper(leading).tick()

    later = RolloutKeeper(leading)
    await later.tick()
    await reported(pool, "one", v1=figures(26))
    await later.tick()

    assert await counted(pool) == {"v1": 26}


async def test_figures_of_older_weights_do_not_count(pool: PoolStore, started: None, leading: LeaderContext) -> None:
    await reported(pool, "one", version=0, v1=figures(20))
    await RolloutKeeper(leading).tick()

    assert await counted(pool) == {}


async def test_good_figures_move_it_on_and_each_step_begins_without_any(
    pool: PoolStore, started: None, leading: LeaderContext, value: Callable[..., float]
) -> None:
    keeper, percents = RolloutKeeper(leading), []
    for _ in range(2):
        percents.append((await current(pool)).percent)
        await reported(pool, "one", v1=figures(20_000), v2=figures(5000))
        await keeper.tick()

    rollout = await current(pool)
    assert (percents, rollout.percent, rollout.state) == ([5.0, 50.0], 100.0, RolloutState.DONE)
    assert await counted(pool) == {}
    assert value("dualmap_worker_rollout_percent", revision="v2") == 100
    assert value("dualmap_worker_rollout_moves_total", state="done") == 1
    assert any("v2 has 50 %" in each.text for each in await pool.chronicle.happened(9))


async def test_a_worse_revision_is_taken_back(
    pool: PoolStore, started: None, leading: LeaderContext, value: Callable[..., float]
) -> None:
    await reported(pool, "one", v1=figures(2000), v2=figures(200, failed=9))

    await RolloutKeeper(leading).tick()

    assert (await current(pool)).state is RolloutState.ROLLED_BACK
    assert (await pool.membership()).revisions.shares["v2"].weight == 0
    assert value("dualmap_worker_rollout_percent", revision="v2") == 0
    assert [each.by for each in await pool.revisions.history(1)] == ["the gate"]


async def test_weights_that_are_changed_by_hand_pause_it(
    pool: PoolStore, started: None, leading: LeaderContext
) -> None:
    await pool.revisions.change(lambda known: with_weights(known, {"v2": 30.0}), "v2 30 %", by="ada")
    keeper = RolloutKeeper(leading)

    await keeper.tick()
    await keeper.tick()

    assert (await current(pool)).state is RolloutState.PAUSED


async def test_a_deposed_leader_moves_nothing(pool: PoolStore, started: None, leading: LeaderContext) -> None:
    await reported(pool, "one", v1=figures(2000), v2=figures(200, failed=9))

    with pytest.raises(LeaseLostError):
        await RolloutKeeper(replace(leading, fence=leading.fence - 1)).tick()
    assert (await current(pool)).state is RolloutState.RUNNING


async def test_without_a_rollout_nothing_is_done(pool: PoolStore, leading: LeaderContext) -> None:
    await RolloutKeeper(leading).tick()

    assert await pool.revisions.rollout() is None
