"""A pool's jobs run where the leader is, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.steps import at_once
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_worker import PoolWorker, SettingsChangedError, SettingsWatch, run_together
from dualmap.workers.settings import WorkerSettings
from tests.support.placements import placement
from tests.workers.contexts import context_of
from tests.workers.scripted_server import ScriptedServer

QUICK = WorkerSettings(lease_s=30.0, health_interval_s=0.05, health_timeout_s=30.0)
JOBS = {
    "adapters",
    "health", "hotness", "evacuator", "reaper", "repairer", "drainer", "sweeper", "learner", "rebalancer", "role mover",
    "settings", "mender", "allotter", "rollouts",
}  # fmt: skip


class Runner:
    """Workers of one pool in this process, on the real clock."""

    def __init__(self, instances: tuple[InstanceSettings, ...] = (), **scheduling: Any) -> None:
        self.scheduling = SchedulingSettings(**{"policy": "dualmap", **scheduling})
        self.store = MemoryStore(self.scheduling)
        self.pool = self.store.pool("default")
        self._settings = PoolSettings(instances=instances)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, worker_id: str) -> tuple[PoolWorker, WorkerMetrics, asyncio.Task[None]]:
        metrics = WorkerMetrics()
        context = context_of(
            self.pool, settings=self._settings, worker=QUICK, time_scale=20.0, worker_id=worker_id, metrics=metrics
        )
        worker = PoolWorker(context, self.store)
        task = asyncio.create_task(worker.run())
        self._tasks.append(task)
        return worker, metrics, task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()


StartRunner = Callable[..., Runner]


@pytest.fixture
async def runner() -> AsyncIterator[StartRunner]:
    runners = []

    def make(*arguments: Any, **named: Any) -> Runner:
        runners.append(Runner(*arguments, **named))
        return runners[-1]

    yield make
    for started in runners:
        await started.stop()


def ticked(metrics: WorkerMetrics) -> set[str]:
    samples = [sample for family in metrics.ticks.collect() for sample in family.samples]
    return {sample.labels["job"] for sample in samples if sample.labels.get("outcome") == "ok"}


async def test_the_leader_does_every_job_and_the_other_only_registers(
    runner: StartRunner, eventually: Callable[..., Awaitable[Any]]
) -> None:
    fleet = runner()
    leader, leading, _ = fleet.start("w1")
    await eventually(lambda: leader.lease)
    _, following, _ = fleet.start("w2")

    await eventually(lambda: ticked(leading) == JOBS | {"registrar"})
    assert ticked(following) <= {"registrar"}


async def test_a_policy_that_does_not_rebalance_has_no_rebalancer(
    runner: StartRunner, eventually: Callable[..., Awaitable[Any]]
) -> None:
    _, metrics, _ = runner(policy="round-robin").start("w1")

    await eventually(lambda: ticked(metrics) == (JOBS | {"registrar"}) - {"rebalancer"})


async def test_a_stopped_leader_hands_over_and_leaves_nothing_running(
    runner: StartRunner, eventually: Callable[..., Awaitable[Any]]
) -> None:
    fleet = runner()
    first, _, task = fleet.start("w1")
    await eventually(lambda: first.lease)
    second, metrics, _ = fleet.start("w2")

    task.cancel()
    await asyncio.wait({task}, timeout=5)

    await eventually(lambda: second.lease)
    await eventually(lambda: ticked(metrics) >= JOBS)
    assert not [running for running in asyncio.all_tasks() if running.get_name().startswith("check/")]


def states(pool: PoolStore) -> dict[str, InstanceState]:
    return {name: spec.state for name, spec in at_once(pool.membership()).instances.items()}


async def test_a_configured_instance_is_registered_checked_and_served(
    runner: StartRunner, servers: Callable[[], Awaitable[ScriptedServer]], eventually: Callable[..., Awaitable[Any]]
) -> None:
    server = await servers()
    fleet = runner((InstanceSettings(id="a", url=server.url),))
    fleet.start("w1")

    await eventually(lambda: states(fleet.pool) == {"a": InstanceState.READY})


async def test_a_dead_instances_held_requests_move_by_themselves(
    runner: StartRunner, servers: Callable[[], Awaitable[ScriptedServer]], eventually: Callable[..., Awaitable[Any]]
) -> None:
    # given a fleet of two with a request held on a
    first, second = await servers(), await servers()
    fleet = runner(
        (
            InstanceSettings(id="a", url=first.url, dispatch_window_tokens=10),
            InstanceSettings(id="b", url=second.url),
        )
    )
    fleet.start("w1")
    await eventually(lambda: states(fleet.pool) == {"a": InstanceState.READY, "b": InstanceState.READY})
    await fleet.pool.heartbeat("router-1", 60_000, {})
    for name in ("running", "held"):
        await fleet.pool.place(placement(name, "a", replica_id="router-1"))
    assert at_once(fleet.pool.records(["held"]))["held"].instance_id == "a"

    await first.stop()

    await eventually(lambda: at_once(fleet.pool.records(["held"]))["held"].instance_id == "b")
    assert states(fleet.pool)["a"] is InstanceState.DOWN


async def test_when_one_job_loses_the_lease_all_jobs_end(pool: PoolStore) -> None:
    running = 0

    class Endless:
        name = "endless"
        interval_s = 60.0

        async def tick(self) -> None:
            nonlocal running
            running += 1
            try:
                await asyncio.Event().wait()
            finally:
                running -= 1

    class Deposed:
        name = "deposed"
        interval_s = 60.0

        async def tick(self) -> None:
            await asyncio.sleep(0.01)
            raise LeaseLostError("newer leader")

    with pytest.raises(LeaseLostError):
        await run_together([Endless(), Endless(), Deposed()], context_of(pool))

    assert running == 0


async def test_the_jobs_end_when_the_settings_are_others_than_they_were_started_with() -> None:
    pool = MemoryStore(SchedulingSettings()).pool("default")
    await SettingsWatch(pool, {}).tick()
    await pool.settings.change({"policy": "dualmap"}, by="ops")
    with pytest.raises(SettingsChangedError):
        await SettingsWatch(pool, {}).tick()
    await SettingsWatch(pool, {"policy": "dualmap"}).tick()
