"""A live request describes itself to a store that forgot it, and its timers end with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.request import RequestState
from tests.router import tools

LONG = "word " * 1000
CLASSES = SchedulingSettings(
    classes=(
        PriorityClassSettings(name="chat", slo_ttft_s=0.5),
        PriorityClassSettings(name="batch", evictable=True),
    )
)
BY_LENGTH = SchedulingSettings(block_tokens=16, slo_ttft_s=0.5, slo_ttft_s_per_1k_tokens=1.0)


async def test_a_scheduled_request_describes_itself_as_it_is(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(LONG, slo_s=2.0))
    other = "b" if request.machine.instance_id == "a" else "a"
    await clock.advance(1.5)

    dispatched = request.records(now_ms=50_000)[0]
    request.first_token()
    prefilled = request.records(now_ms=50_000)[0]
    request.finish(Outcome.COMPLETED)

    assert (dispatched.state, dispatched.instance_id, dispatched.alternative_id) == (
        RequestState.DISPATCHED,
        request.machine.instance_id,
        other,
    )
    assert (dispatched.enqueued_ms, dispatched.slo_ms, dispatched.uncached_tokens) == (48_500, 2000, 1250)
    assert prefilled.state is RequestState.PREFILLED
    assert request.records(now_ms=50_000) == ()


@pytest.mark.parametrize("scheduling", [BY_LENGTH])
@pytest.mark.parametrize(("header_slo_s", "slo_s"), [(None, 1.75), (2.0, 2.0)])
async def test_a_request_without_an_slo_of_its_own_has_that_of_its_length(
    start_runtime: Any, header_slo_s: float | None, slo_s: float
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.intake.place(tools.request(LONG, slo_s=header_slo_s))

    assert (request.machine.spec.chain.prompt_tokens, request.machine.spec.slo_s) == (1250, slo_s)
    assert request.records(now_ms=50_000)[0].slo_ms == slo_s * 1000
    request.finish(Outcome.COMPLETED)


async def test_a_scheduled_request_keeps_no_view_alive_and_tells_of_the_one_it_began_with(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    keeper = runtime.pools.pools["default"].view
    began_with = keeper.view
    request = await runtime.intake.place(tools.request(LONG))

    keeper.view = replace(
        began_with,
        epoch=99,
        tree_version=99,
        tree=HotnessTree(dict(zip(request.machine.spec.chain.hashes[:2], (1, 2), strict=True))),
    )

    story = request.explain()
    key = story.prompt.key
    assert (key.epoch, key.tree_version, key.blocks) == (began_with.epoch, began_with.tree_version, 2)
    assert not any(kept is began_with for kept in (*vars(request).values(), *vars(request.machine).values()))
    request.finish(Outcome.COMPLETED)


async def test_a_migrated_request_describes_where_it_is_now(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    filling = [await runtime.intake.place(tools.request(f"{number} {LONG}")) for number in range(2)]
    placing = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="moved")))
    await tools.settle()
    pool = store.pool("default")
    record = (await pool.records(["moved"]))["moved"]
    lease = await pool.leader_lease.acquire("leader", 60_000)
    await pool.queues.migrate(record, record.alternative_id, reason="test", fence=lease.fence)
    for request in filling:
        request.finish(Outcome.COMPLETED)
    moved = await asyncio.wait_for(placing, 60)

    told = moved.records(now_ms=1)[0]
    known = (await pool.records(["moved"]))["moved"]

    assert (told.instance_id, told.alternative_id) == (known.instance_id, known.alternative_id)
    assert told.uncached_tokens == known.uncached_tokens
    moved.finish(Outcome.COMPLETED)


async def test_the_timer_of_a_failed_try_does_not_release_the_next_one(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(LONG, stream=False))  # done after 1.25 s
    request.sent()
    await clock.advance(1.0)
    await request.failed(Failed(InstanceFailure(FailureKind.CLOSED)))
    request.sent()
    request.sent()  # again, over a new connection: it has one timer

    async def pending_tokens() -> int:
        tokens: int = (await store.pool("default").snapshot()).loads[request.machine.instance_id].pending_tokens
        return tokens

    await clock.advance(0.5)
    assert await pending_tokens() == 1250
    await clock.advance(0.8)
    assert await pending_tokens() == 0
    request.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("stream", [True, False])
async def test_no_timer_outlives_its_request(start_runtime: Any, clock: Any, stream: bool) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    def releases() -> float:
        labels = {"call": "release"}
        return runtime.context.metrics.registry.get_sample_value("dualmap_store_call_seconds_count", labels) or 0.0

    request = await runtime.intake.place(tools.request(LONG, stream=stream))
    before = releases()
    request.sent()
    request.finish(Outcome.COMPLETED)
    await tools.settle()
    assert releases() == before + 1.0

    await clock.advance(10.0)

    assert releases() == before + 1.0


@pytest.mark.parametrize("names", [("a", "b"), ("a",)])
async def test_a_stream_that_is_given_back_is_prefilled_and_released_once_more(
    start_runtime: Any, store: Any, names: tuple[str, ...]
) -> None:
    runtime = await start_runtime(instances=tuple(map(tools.spec, names)))
    request = await runtime.intake.place(tools.request(LONG))
    request.first_token()
    gave_back = request.machine.instance_id

    await request.failed(Failed(InstanceFailure(FailureKind.RECOMPUTED)))

    assert (request.machine.instance_id == gave_back) is (len(names) == 1)  # nobody else is left
    pool = store.pool("default")
    assert (await pool.snapshot()).loads[request.machine.instance_id].pending_tokens > 0
    request.first_token()
    await tools.settle()
    assert (await pool.snapshot()).loads[request.machine.instance_id].pending_tokens == 0
    request.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("pinned_to", [None, "a"])
async def test_a_record_that_is_told_again_says_what_was_said_when_it_was_placed(
    start_runtime: Any, store: Any, clock: Any, pinned_to: str | None
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    live = await runtime.intake.place(tools.request(LONG, pinned_to=pinned_to))
    known = (await store.pool("default").records([live.request_id]))[live.request_id]

    [again] = live.records(now_ms=clock.now_ms())

    stamped = {"enqueued_ms": known.enqueued_ms, "dispatched_ms": known.dispatched_ms}
    assert replace(again, **stamped) == known
    assert again.pinned is (pinned_to is not None)
    live.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [CLASSES])
async def test_a_request_that_would_be_late_has_an_answer_of_a_lower_class_leave_and_that_is_placed_again(
    start_runtime: Any,
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    def request(name: str, text: str) -> Any:
        made = tools.request(text, request_id=name, stream=True)
        made.asked_class, made.not_continued = name, ""
        return made

    batch, told = await runtime.intake.place(request("batch", LONG * 8)), list[str]()
    assert batch.machine.is_evictable
    batch.on_evict = told.append
    batch.sent()
    placing = asyncio.create_task(runtime.intake.place(request("chat", "word")))
    await tools.settle()
    assert [("higher class" in why, placing.done()) for why in told] == [(True, False)]

    again = asyncio.create_task(batch.failed(Failed(InstanceFailure(FailureKind.EVICTED))))
    chat = await asyncio.wait_for(placing, 60)
    assert (chat.machine.instance_id, chat.machine.is_evictable) == ("a", False)
    chat.finish(Outcome.COMPLETED)

    await asyncio.wait_for(again, 60)
    assert (batch.machine.instance_id, batch.machine.evictions) == ("a", 1)
    batch.finish(Outcome.COMPLETED)
    assert runtime.pools.pools["default"].evictable.is_empty


@pytest.mark.parametrize(("prompts", "reported", "unreported"), [(1, 128, 0), (2, 0, 1)])
async def test_the_cached_tokens_of_a_list_of_prompts_are_compared_with_nothing(
    start_runtime: Any, prompts: int, reported: int, unreported: int
) -> None:
    """vLLM reports those of one prompt alone, with the tokens of all."""
    runtime = await start_runtime(instances=(tools.spec("a"),))
    sent = tools.request(LONG)
    sent.prompts = prompts
    live = await runtime.intake.place(sent)

    live.finish(Outcome.COMPLETED, Usage(prompt_tokens=2000, cached_tokens=128, output_tokens=3))

    metrics = runtime.pools.pools["default"].metrics
    assert metrics.hit_tokens_reported.value == reported
    assert metrics.prompt_tokens_reported.value == (2000 if reported else 0)
    assert bool(metrics.prompt_tokens_unreported.value) is bool(unreported)
