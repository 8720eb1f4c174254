"""Background work that outlives its mistakes."""

from __future__ import annotations

from typing import Any

from dualmap.router.replica.supervision import Supervisor
from tests.router import tools


async def test_a_job_that_fails_is_started_again(clock: Any) -> None:
    starts: list[float] = []

    async def fails_twice() -> None:
        starts.append(clock.now_s)
        if len(starts) <= 2:
            raise ValueError("a bug")
        await clock.sleep(1e9)

    supervisor = Supervisor(clock)
    supervisor.start("job", fails_twice)
    await clock.advance(10.0)

    assert len(starts) == 3
    await supervisor.stop()


async def test_stopping_ends_all_jobs(clock: Any) -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await clock.sleep(1e9)
        finally:
            ended.append("x")

    supervisor = Supervisor(clock)
    for name in "ab":
        supervisor.start(name, endless)
    await tools.settle()

    await supervisor.stop()

    assert ended == ["x", "x"]
