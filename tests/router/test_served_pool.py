"""What a pool's requests share on a replica."""

from __future__ import annotations

from typing import Any

from router.outcome import Outcome
from router.replica import RECONCILE_S


async def test_what_left_the_fleet_is_forgotten(start_runtime: Any, store: Any, clock: Any, tools: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    tools.break_after(runtime, faults=1)
    pool = runtime.pools.pools["default"]
    for _ in "ab":
        request = await runtime.lifecycle.place(tools.request())
        request.finish(Outcome.UPSTREAM_FAILED)
        await tools.settle()
    assert set(pool.breakers.states()) == {"a", "b"}
    await store.pool("default").remove_instance("a")

    await clock.advance(RECONCILE_S + 1.5)

    assert set(pool.breakers.states()) == {"b"}
