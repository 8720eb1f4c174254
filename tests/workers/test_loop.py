"""The loop around a job: no failure but a lost lease ends it, and failures slow it down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dualmap.statestore.errors import LeaseLostError, StoreUnavailableError
from dualmap.workers.context import PoolContext
from dualmap.workers.loop import BACKOFF_MAX_S, run_job
from tests.support.manual_clock import ManualClock


class ScriptedJob:
    """Raises its failures one after the other, then succeeds for ever."""

    name = "scripted"
    interval_s = 1.0

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.rounds = 0

    async def tick(self) -> None:
        self.rounds += 1
        if self.failures:
            raise self.failures.pop(0)


Run = Callable[..., asyncio.Task[None]]


@pytest.fixture
async def run(context: PoolContext) -> AsyncIterator[Run]:
    tasks = []

    def start(job: Any, **bounds: float) -> Any:
        task = asyncio.create_task(run_job(job, context, **bounds))
        tasks.append(task)
        return task

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_healthy_job_ticks_at_its_interval(clock: ManualClock, run: Run, value: Callable[..., float]) -> None:
    job = ScriptedJob()
    run(job)

    await clock.advance(10.5)

    assert job.rounds == 11
    assert value("dualmap_worker_ticks_total", job="scripted", outcome="ok") == 11


async def test_an_outage_of_the_store_slows_the_job_down_and_never_ends_it(
    clock: ManualClock, run: Run, value: Callable[..., float]
) -> None:
    job = ScriptedJob(*[StoreUnavailableError("away")] * 8)
    run(job)

    await clock.advance(70)

    assert value("dualmap_worker_ticks_total", job="scripted", outcome="store_unavailable") == 8
    assert value("dualmap_worker_ticks_total", job="scripted", outcome="ok") > 40
    assert clock.naps_s[:5] == sorted(clock.naps_s[:5]) and clock.naps_s[4] > 10 * clock.naps_s[0]
    assert max(clock.naps_s) <= BACKOFF_MAX_S * 1.25


async def test_a_defect_in_one_round_does_not_end_the_job(
    clock: ManualClock, run: Run, value: Callable[..., float], caplog: pytest.LogCaptureFixture
) -> None:
    job = ScriptedJob(ZeroDivisionError("defect"))
    run(job)

    await clock.advance(5)

    assert job.rounds > 3
    assert value("dualmap_worker_ticks_total", job="scripted", outcome="error") == 1
    assert "ZeroDivisionError" in caplog.text


async def test_a_lost_lease_ends_the_job(clock: ManualClock, run: Run) -> None:
    task = run(ScriptedJob(LeaseLostError("deposed")))

    await clock.advance(0)

    assert isinstance(task.exception(), LeaseLostError)


async def test_a_round_that_hangs_is_cut_off(clock: ManualClock, run: Run, value: Callable[..., float]) -> None:
    class HangsOnce(ScriptedJob):
        async def tick(self) -> None:
            await super().tick()
            if self.rounds == 1:
                await asyncio.Event().wait()

    job = HangsOnce()
    run(job, tick_timeout_s=0.01)
    deadline = asyncio.get_running_loop().time() + 60
    while value("dualmap_worker_ticks_total", job="scripted", outcome="timeout") < 1:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)

    await clock.advance(1)

    assert value("dualmap_worker_ticks_total", job="scripted", outcome="timeout") == 1
    assert value("dualmap_worker_ticks_total", job="scripted", outcome="ok") == 1
