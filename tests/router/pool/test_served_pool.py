"""The parts that a pool's requests share on a replica."""

from __future__ import annotations

from typing import Any

from dualmap.router.replica.replica import RECONCILE_S
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from tests.router import tools


async def test_what_left_the_fleet_is_forgotten(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    tools.break_after(runtime, faults=1)
    pool = runtime.pools.pools["default"]
    for _ in "ab":
        request = await runtime.intake.place(tools.request())
        request.broke_off(InstanceFailure(FailureKind.TIMEOUT))
        request.finish(Outcome.UPSTREAM_FAILED)
        await tools.settle()
    first, second = pool.evidence.breakers.states()
    await store.pool("default").members.remove_instance(first)

    await clock.advance(RECONCILE_S + 1.5)

    assert set(pool.evidence.breakers.states()) == {second}
