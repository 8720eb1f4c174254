"""Dispatched, prefilling, presumed: what a request has reserved until its first token, seen or presumed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.request import RequestState
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, live, loads, nothing_is_left


async def test_a_placed_request_is_pending_until_its_first_token_and_gone_after_its_end(
    start_runtime: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.intake.place(tools.request(LONG))

    machine = request.machine
    assert (machine.instance_id, machine.target.url, machine.tries) == ("a", "http://a.test:8000", 1)
    assert machine.target.data_parallel_rank is None
    assert (await loads(store))["a"].pending_tokens == 1250
    request.first_token()
    await tools.settle()
    assert (await loads(store))["a"].pending_tokens == 0
    assert (await loads(store))["a"].running_requests == 1
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_the_rendered_prompt_is_not_kept(start_runtime: Any, path: str) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    received = tools.request(LONG, path=path)

    request = await runtime.intake.place(received)

    assert received.prompt is None
    request.finish(Outcome.COMPLETED)


async def test_the_second_of_two_equal_prompts_expects_a_hit_where_the_first_went(
    start_runtime: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    first = await runtime.intake.place(tools.request(LONG))
    first.finish(Outcome.COMPLETED)
    await tools.settle()

    second = await runtime.intake.place(tools.request(LONG))

    assert second.machine.instance_id == first.machine.instance_id
    assert first.expected_cached_tokens == 0
    assert second.expected_cached_tokens == 1248  # 78 full blocks of 16 tokens
    second.finish(Outcome.COMPLETED)


async def test_an_answer_that_does_not_stream_is_released_when_its_prefill_should_be_done(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))  # 1000 tokens per second
    request = await runtime.intake.place(tools.request(LONG, stream=False))
    request.sent()

    await clock.advance(1.2)
    assert (await loads(store))["a"].pending_tokens == 1250
    await clock.advance(0.1)

    assert (await loads(store))["a"].pending_tokens == 0
    assert (await live(store))[request.request_id] is RequestState.PREFILLED
    request.finish(Outcome.COMPLETED)


async def test_one_that_was_held_is_released_after_a_full_window_and_its_own_prefill(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))  # a window of 1000 tokens, 1000 tokens per second
    filling = await runtime.intake.place(tools.request(f"1 {LONG}"))
    placing = asyncio.create_task(runtime.intake.place(tools.request(f"2 {LONG}", stream=False)))
    await tools.settle()
    assert not placing.done()
    filling.first_token()
    request = await asyncio.wait_for(placing, 60)
    request.sent()

    await clock.advance(2.2)
    assert (await loads(store))["a"].pending_tokens == 1250
    await clock.advance(0.1)

    assert (await loads(store))["a"].pending_tokens == 0
    for each in (filling, request):
        each.finish(Outcome.COMPLETED)


async def test_a_streamed_answer_is_released_by_its_first_token_alone(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request(LONG, stream=True))

    await clock.advance(60.0)

    assert (await loads(store))["a"].pending_tokens == 1250
    request.finish(Outcome.COMPLETED)
