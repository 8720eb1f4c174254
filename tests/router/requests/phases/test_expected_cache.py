"""Dispatched: the cached tokens that a request is expected to find."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.outcome import Outcome, Usage
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.kv_views import KvChange
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, nothing_is_left


@pytest.mark.parametrize(
    "scheduling", [SchedulingSettings(policy="dualmap", queue_order="deadline", block_tokens=16, slo_ttft_s=8.0)]
)
async def test_a_granted_request_expects_the_cache_as_it_was_counted_when_it_was_granted(
    start_runtime: Any, store: Any
) -> None:
    """By then the request before it has brought its prefix."""
    runtime = await start_runtime(instances=(tools.spec("a", prefill_tokens_per_s=300.0),))
    running = await runtime.intake.place(tools.request("another " * 600))
    brings = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()
    shares = asyncio.create_task(runtime.intake.place(tools.request(LONG + " and more", request_id="shares")))
    await tools.settle()
    placed = (await store.pool("default").records(["shares"]))["shares"]

    running.finish(Outcome.COMPLETED)
    first = await asyncio.wait_for(brings, 60)
    first.first_token()

    granted = await asyncio.wait_for(shares, 60)
    assert placed.uncached_tokens == granted.machine.spec.chain.prompt_tokens
    assert granted.expected_cached_tokens == 1248
    for request in (first, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_an_alias_shares_the_models_cache_and_an_adapter_does_not(start_runtime: Any) -> None:
    pool = PoolSettings(model="base", aliases=("gpt",), loras=("tuned",))
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=(pool,))

    requests = {name: await runtime.intake.place(tools.request(model=name)) for name in ("base", "gpt")}
    requests["tuned"] = await runtime.intake.place(tools.request(model="tuned"))

    assert [requests[name].machine.spec.model for name in ("base", "gpt", "tuned")] == ["base", "base", "tuned"]
    keys = {name: request.explain().prompt.key.hash for name, request in requests.items()}
    assert keys["base"] == keys["gpt"] != keys["tuned"]
    for request in requests.values():
        request.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_conversation_finds_its_cache_over_another_api(start_runtime: Any, path: str) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    system, question = "You help. " * 300, "What now? " * 100
    first = await runtime.intake.place(
        tools.request(
            path="/v1/chat/completions",
            body={"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]},
        )
    )
    first.first_token()
    await tools.settle()
    bodies = {
        "/v1/messages": {"system": system, "messages": [{"role": "user", "content": question + "and then?"}]},
        "/v1/responses": {"instructions": system, "input": question + "and then?"},
    }

    second = await runtime.intake.place(tools.request(path=path, body=bodies[path]))

    assert second.machine.instance_id == first.machine.instance_id
    assert second.expected_cached_tokens > 900
    for request in (first, second):
        request.finish(Outcome.COMPLETED)


async def test_a_turn_at_once_is_expected_to_find_the_answer_before_it(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    ids = list(range(1000))
    first = await runtime.intake.place(tools.request(body={"prompt": ids}))
    first.first_token()
    first.finish(Outcome.COMPLETED, Usage(prompt_tokens=1000, output_tokens=300))
    await tools.settle()

    second = await runtime.intake.place(tools.request(body={"prompt": [*ids, *range(5000, 5500)]}))

    block_tokens = second.machine.spec.chain.block_tokens
    assert second.expected_cached_tokens == 1299 // block_tokens * block_tokens
    second.finish(Outcome.COMPLETED)


async def test_the_next_turn_of_a_hybrid_model_is_not_expected_to_find_the_answer(
    start_runtime: Any, store: Any
) -> None:
    """Also where the model was known to be hybrid only after the first turn was placed."""
    runtime = await start_runtime(instances=(tools.spec("a"),))
    ids = list(range(1000))
    first = await runtime.intake.place(tools.request(body={"prompt": ids}))
    first.first_token()
    block_tokens, hashes = first.machine.spec.chain.block_tokens, first.machine.spec.chain.hashes
    first.finish(Outcome.COMPLETED, Usage(prompt_tokens=1000, output_tokens=300))
    events = store.pool("default").kv_events
    await events.renew_subscriber("worker", 60_000)
    fence = (await events.claim("a", "worker")).fence
    await events.apply("a", fence, KvChange(0, 1.0, [*hashes], hit_step_tokens=block_tokens))

    second = await runtime.intake.place(tools.request(body={"prompt": [*ids, *range(5000, 5500)]}))

    assert second.expected_cached_tokens == 1000 // block_tokens * block_tokens
    second.finish(Outcome.COMPLETED)


async def test_requests_ahead_are_expected_to_take_the_memory_of_a_cached_prefix(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", kv_capacity_tokens=8000),))
    ids = list(range(1000))
    first = await runtime.intake.place(tools.request(body={"prompt": ids}))
    first.finish(Outcome.COMPLETED)
    await tools.settle()

    ahead = await runtime.intake.place(tools.request(body={"prompt": list(range(10_000, 17_000))}))
    ahead.sent()
    ahead.first_token()
    await tools.settle()
    turn = await runtime.intake.place(tools.request(body={"prompt": [*ids, *range(5000, 5100)]}))
    turn.sent()
    ahead.finish(Outcome.COMPLETED)

    blocks = 8000 // 16 - 1 - -(-(7000 + ahead.prompt.expected_output_tokens // 2) // 16)
    assert turn.expected_cached_tokens == 16 * blocks < 992
    turn.finish(Outcome.COMPLETED)
    assert len(turn.pool.contexts_ahead) == 0


@pytest.mark.parametrize("held", [False, True])
async def test_requests_of_another_replica_are_expected_to_take_memory_too(start_runtime: Any, held: bool) -> None:
    window = 1 if held else 8192
    runtime = await start_runtime(instances=(tools.spec("a", kv_capacity_tokens=8000, dispatch_window_tokens=window),))
    other = await start_runtime()
    ids = list(range(1000))
    first = await runtime.intake.place(tools.request(body={"prompt": ids}))
    first.sent()
    first.finish(Outcome.COMPLETED)
    await tools.settle()

    ahead = await other.intake.place(tools.request(body={"prompt": list(range(10_000, 17_000))}))
    ahead.sent()
    placing = asyncio.create_task(runtime.intake.place(tools.request(body={"prompt": [*ids, *range(5000, 5100)]})))
    await tools.settle()
    assert placing.done() is not held
    ahead.first_token()
    turn = await placing
    turn.sent()

    context_tokens = 7000 + ahead.prompt.expected_output_tokens
    output_tokens = first.prompt.expected_output_tokens
    taken_tokens = context_tokens - output_tokens // 2 + 16 // 2
    assert turn.expected_cached_tokens == (8000 - 16 - taken_tokens) // 16 * 16 < 992
    ahead.finish(Outcome.COMPLETED)
    turn.finish(Outcome.COMPLETED)
