"""What a pool's requests share on a replica."""

from __future__ import annotations

from typing import Any

from router.outcome import Outcome


async def test_waits_and_rates_come_from_the_load_last_seen(start_runtime: Any, tools: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", prefill_tokens_per_s=500.0),))
    pool = runtime.pools.pools["default"]
    assert pool.prefill_rate("a") == 500.0  # the prior, before anything was seen
    for _ in range(2):
        await runtime.lifecycle.place(tools.request("x" * 2000))

    assert pool.expected_wait_s("a") == 1.0  # 500 tokens of the first were pending when the second looked
    assert pool.expected_wait_s("unknown") == 1.0


async def test_what_left_the_fleet_is_forgotten(start_runtime: Any, store: Any, clock: Any, tools: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), reconcile_s=5.0)
    pool = runtime.pools.pools["default"]
    for _ in range(2):
        request = await runtime.lifecycle.place(tools.request())
        request.finish(Outcome.UPSTREAM_FAILED)
        await tools.settle()
    assert set(pool.last_seen.all()) == {"a", "b"}
    await store.pool("default").remove_instance("a")

    await clock.advance(6.5)

    assert set(pool.last_seen.all()) == {"b"}
