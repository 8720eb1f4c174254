"""The life of a request over the in-memory store, in hand-driven time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.errors import (
    HoldTimeoutError,
    NotFoundError,
    QueueFullError,
    ReplicaFullError,
    RequestQuarantinedError,
    StoreAwayError,
    UnavailableError,
    UnknownModelError,
    UpstreamError,
    UpstreamTimeoutError,
)
from dualmap.router.pool.view import POLL_S as VIEW_POLL_S
from dualmap.router.prompts.inference_request import response_id
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.estimates.learning import EndSample
from dualmap.scheduling.placing.placement import PlaceReply, PlaceStatus
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools
from tests.statestore.samples import finish

LONG = "word " * 1000
"""1250 tokens: more than the dispatch window, so one such prompt fills an instance."""
REFUSED = InstanceFailure(FailureKind.CONNECT, "connection refused")
DEAD = InstanceFailure(FailureKind.CLOSED, "the connection broke")


async def loads(store: Any) -> dict[str, Any]:
    return dict((await store.pool("default").snapshot()).loads)


async def live(store: Any) -> dict[str, RequestState]:
    return {record.request_id: record.state for record in (await store.pool("default").snapshot()).requests}


async def nothing_is_left(store: Any, runtime: Any) -> bool:
    await tools.settle()
    snapshot = await store.pool("default").snapshot()
    idle = all(load.pending_tokens == load.running_requests == 0 for load in snapshot.loads.values())
    return idle and not snapshot.requests and len(runtime.context.live) == 0


async def full_fleet(start_runtime: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """Two instances, each filled by one dispatched request: the next one is held."""
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), **settings)
    requests = [await runtime.intake.place(tools.request(f"{number} {LONG}")) for number in range(2)]
    assert {request.instance_id for request in requests} == {"a", "b"}
    return runtime, requests


# the happy path --------------------------------------------------------------------------------------------------


async def test_a_placed_request_is_pending_until_its_first_token_and_gone_after_its_end(
    start_runtime: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.intake.place(tools.request(LONG))

    assert (request.instance_id, request.target.url, request.tries) == ("a", "http://a.test:8000", 1)
    assert request.target.data_parallel_rank is None
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

    assert second.instance_id == first.instance_id
    assert first.expected_cached_tokens == 0
    assert second.expected_cached_tokens == 1248  # 78 full blocks of 16 tokens
    second.finish(Outcome.COMPLETED)


async def test_ending_twice_counts_and_releases_once(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request())

    request.finish(Outcome.CLIENT_GONE)
    request.finish(Outcome.COMPLETED)
    request.first_token()

    assert await nothing_is_left(store, runtime)
    registry = runtime.context.metrics.registry
    counted = {
        outcome: registry.get_sample_value("dualmap_requests_total", {"pool": "default", "outcome": outcome})
        for outcome in ("client_gone", "completed")
    }
    assert counted == {"client_gone": 1.0, "completed": 0.0}


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


async def contents(store: Any) -> list[Any]:
    return [sample.content for sample in await store.pool("default").publications.samples("0", 100)]


async def test_the_leader_is_told_how_many_tokens_an_instance_counted(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.intake.place(tools.request(LONG))
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=2500, cached_tokens=100, output_tokens=70))
    await tools.settle()

    assert await contents(store) == [EndSample(5000, 2500, 70)]
    registry = runtime.context.metrics.registry
    reported = registry.get_sample_value("dualmap_hit_tokens_total", {"pool": "default", "by": "reported"})
    assert reported == 100.0


async def test_the_leader_is_told_how_many_images_a_prompt_had(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    received = tools.request()
    received.prompt = sent_prompt("/v1/chat/completions", {"messages": [{"role": "user", "content": [image, image]}]})

    request = await runtime.intake.place(received)
    assert (await loads(store))["a"].pending_tokens == 2048 + 21  # of the prior, and of role and marks
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=1300, output_tokens=7))
    await tools.settle()

    assert await contents(store) == [EndSample(85, 1300, 7, images=2)]


async def test_a_first_token_teaches_what_was_expected_of_it(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    before = await runtime.intake.place(tools.request("other " * 100))
    request = await runtime.intake.place(tools.request(LONG))
    await clock.advance(1.5)

    request.first_token()
    await tools.settle()

    [content] = await contents(store)
    assert (content.instance_id, content.tokens, content.prefilled_ms - content.enqueued_ms) == ("a", 1250, 1500)
    constant, ahead_s, compute_s, *_ = content.features
    assert (constant, ahead_s, compute_s) == (1.0, pytest.approx(0.15), pytest.approx(1.25))
    for each in (before, request):
        each.finish(Outcome.COMPLETED)


async def test_the_ttft_of_a_retry_teaches_nothing_but_its_prefill(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(LONG))
    await request.failed(REFUSED)

    request.first_token()
    await tools.settle()

    [content] = await contents(store)
    assert (content.instance_id, content.tokens, content.features) == (request.instance_id, 1250, None)
    request.finish(Outcome.COMPLETED)


async def test_an_answer_that_does_not_stream_teaches_no_prefill(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request(LONG, stream=False))

    await clock.advance(1.3)
    request.finish(Outcome.COMPLETED)
    await tools.settle()

    assert await contents(store) == []


@pytest.mark.parametrize(("outcome", "silent_s"), [(Outcome.COMPLETED, 0.0), (Outcome.CLIENT_GONE, 21.3)])
async def test_only_the_answer_of_a_request_that_does_not_stream_is_a_sign_of_life_of_its_instance(
    outcome: Outcome, silent_s: float, start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    texts = ("x" * 400, "y" * 400)
    request, other = [await runtime.intake.place(tools.request(text, stream=False)) for text in texts]
    for each in (request, other):
        each.sent()

    await clock.advance(21.3)  # its first token is presumed
    presumed = (await loads(store))["a"]
    if outcome is Outcome.COMPLETED:
        request.first_token()
    request.finish(outcome)
    await tools.settle()

    assert (presumed.pending_tokens, presumed.silent_s) == (0, pytest.approx(21.3))
    assert (await loads(store))["a"].silent_s == pytest.approx(silent_s)
    other.finish(Outcome.COMPLETED)


# what is refused -------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_refused_by_name(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    with pytest.raises(UnknownModelError, match="'gpt-9'"):
        await runtime.intake.place(tools.request(model="gpt-9"))


async def test_without_a_ready_instance_the_answer_is_503(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.DOWN),))

    with pytest.raises(UnavailableError) as refused:
        await runtime.intake.place(tools.request())

    assert refused.value.retry_after_s is not None
    assert await nothing_is_left(store, runtime)


async def test_an_instance_that_became_ready_a_moment_ago_is_found(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.STARTING),))
    await store.pool("default").members.set_instance_state("a", InstanceState.READY)

    request = await runtime.intake.place(tools.request())

    assert request.instance_id == "a"
    request.finish(Outcome.COMPLETED)


async def test_full_queues_everywhere_are_429_with_the_time_to_work_them_off(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(
        instances=(tools.spec("a", max_queued_requests=0), tools.spec("b", max_queued_requests=0))
    )
    requests = [await runtime.intake.place(tools.request(f"{number} {LONG}")) for number in range(2)]

    with pytest.raises(QueueFullError) as refused:
        await runtime.intake.place(tools.request(f"3 {LONG}"))

    assert refused.value.retry_after_s == pytest.approx(1.25)  # 1250 pending tokens at 1000 a second
    for request in requests:
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_replica_takes_no_more_than_its_limit(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), max_requests=1)
    request = await runtime.intake.place(tools.request())

    with pytest.raises(ReplicaFullError):
        await runtime.intake.place(tools.request())

    request.finish(Outcome.COMPLETED)
    again = await runtime.intake.place(tools.request())
    again.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


# held requests ---------------------------------------------------------------------------------------------------


async def test_a_held_request_goes_when_room_appears(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()
    assert not waiting.done()

    for request in requests:
        request.first_token()
    await tools.settle()

    granted = await waiting
    assert (await live(store))[granted.request_id] is RequestState.DISPATCHED
    for request in (*requests, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_goes_where_it_was_migrated_to(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="moved")))
    await tools.settle()
    record = (await store.pool("default").records(["moved"]))["moved"]
    lease = await store.pool("default").leader_lease.acquire("leader", 60_000)

    await store.pool("default").queues.migrate(record, record.alternative_id, reason="test", fence=lease.fence)
    next(request for request in requests if request.instance_id == record.alternative_id).first_token()

    granted = await asyncio.wait_for(waiting, 60)
    assert granted.instance_id == record.alternative_id
    for request in (*requests, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_grant_that_overtakes_its_reservations_answer_is_kept(start_runtime: Any, store: Any) -> None:
    tampered: list[Any] = []

    def through(real: Any) -> Any:
        tampered.append(tools.Tampered(real))
        return tampered[0]

    runtime = await start_runtime(instances=(tools.spec("a"),), through=through)
    pool = runtime.pools.pools["default"]

    async def held_but_granted(placement: Any) -> PlaceReply:
        reply = await store.pool("default").place(placement)
        pool.grant_waiters.deliver(Grant(placement.request.request_id, "a", "replica-1", 1, 100))
        await tools.settle()
        return replace(reply, status=PlaceStatus.HELD)

    tampered[0].before["place"] = held_but_granted

    request = await asyncio.wait_for(runtime.intake.place(tools.request()), 60)

    assert request.instance_id == "a"
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_grant_that_was_missed_is_found_by_looking(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    pool = runtime.pools.pools["default"]
    pool.grant_waiters.deliver = lambda grant: None  # the stream tells nothing
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()
    for request in requests:
        request.first_token()
    await tools.settle()
    assert not waiting.done()

    await clock.advance(1.1)

    granted = await asyncio.wait_for(waiting, 60)
    for request in (*requests, granted):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


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


async def test_a_client_that_leaves_while_held_leaves_nothing(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    for request in requests:
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_that_is_cut_off_counts_as_that(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    held = asyncio.create_task(runtime.intake.place(tools.request()))
    await tools.settle()

    held.cancel(Outcome.CUT_OFF)
    with pytest.raises(asyncio.CancelledError):
        await held

    cut_off = {"pool": "default", "outcome": "cut_off"}
    assert runtime.context.metrics.registry.get_sample_value("dualmap_requests_total", cut_off) == 1
    for request in requests:
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_request_is_not_held_past_the_longest_hold(
    start_runtime: Any, store: Any, clock: Any, scheduling: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request(LONG))
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG)))
    await tools.settle()

    await clock.advance(scheduling.max_hold_s - 0.1)
    assert not waiting.done()
    await clock.advance(0.2)

    with pytest.raises(HoldTimeoutError) as refused:
        await waiting
    assert refused.value.retry_after_s == pytest.approx(1.25)
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_that_the_store_forgot_is_placed_again(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="forgotten")))
    await tools.settle()
    await finish(store.pool("default"), "forgotten")
    for request in requests:
        request.finish(Outcome.COMPLETED)
    await tools.settle()

    await clock.advance(1.1)

    placed = await asyncio.wait_for(waiting, 60)
    assert (await live(store)) == {"forgotten": RequestState.DISPATCHED}
    placed.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_held_request_that_the_store_knows_after_all_is_placed_again_under_its_own_id(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    """A look-up that found nothing was wrong: an older copy of the store answered it."""
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)
    filling = await runtime.intake.place(tools.request(f"1 {LONG}"))
    waiting = asyncio.create_task(runtime.intake.place(tools.request(LONG, request_id="mine")))
    await tools.settle()

    async def nothing(*_: Any) -> dict[str, Any]:
        tampered.before.clear()
        return {"another": None}

    tampered.before["records"] = nothing
    await clock.advance(1.1)

    assert set(await live(store)) == {filling.request_id, "mine"}
    assert (await store.pool("default").records(["mine"]))["mine"].attempt == 2
    filling.finish(Outcome.COMPLETED)
    (await asyncio.wait_for(waiting, 60)).finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


# decisions that were overtaken -----------------------------------------------------------------------------------


async def test_an_instance_that_went_down_meanwhile_is_passed_over(start_runtime: Any, store: Any) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)

    async def goes_down_now(placement: Any) -> None:
        tampered.before.clear()
        await store.pool("default").members.set_instance_state("a", InstanceState.DOWN)

    tampered.before["place"] = goes_down_now

    request = await runtime.intake.place(tools.request())

    assert request.instance_id == "b"
    await tools.settle()
    assert runtime.pools.pools["default"].view.view.ready == ("b",)
    request.finish(Outcome.COMPLETED)


async def test_a_fleet_that_was_exchanged_meanwhile_is_looked_at_afresh(start_runtime: Any, store: Any) -> None:
    tampered, pool = tools.Tampered(store), store.pool("default")
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered)

    async def exchanged(placement: Any) -> None:
        tampered.before.clear()
        for former, instance_id in (("a", "c"), ("b", "d")):
            await pool.members.remove_instance(former)
            await pool.members.put_instance(tools.spec(instance_id))

    tampered.before["place"] = exchanged

    request = await runtime.intake.place(tools.request())

    assert request.instance_id in ("c", "d")
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_a_store_out_of_reach_is_503_and_what_may_have_been_reserved_is_released(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    tampered = tools.Tampered(store)
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)

    async def answer_lost(placement: Any) -> None:
        await store.pool("default").place(placement)
        raise StoreUnavailableError("the answer was lost")

    tampered.before["place"] = answer_lost

    with pytest.raises(StoreAwayError):
        await runtime.intake.place(tools.request(LONG))

    assert await nothing_is_left(store, runtime)


# retries ---------------------------------------------------------------------------------------------------------


async def test_a_failed_instance_costs_the_client_nothing(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b"), tools.spec("c")))
    request = await runtime.intake.place(tools.request(LONG))
    first = request.instance_id

    await request.failed(REFUSED)

    assert request.instance_id == request.explain().rounds[0].decision.alternative_id
    assert request.tries == 2
    assert (await loads(store))[first].pending_tokens == 0
    await request.failed(REFUSED)
    assert request.tries == 3
    assert request.instance_id not in request.machine.excluded
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_a_request_that_waits_for_an_instance_hears_that_it_went_down(
    start_runtime: Any, store: Any, clock: Any, path: str
) -> None:
    class Listener:
        why = ""

        def instance_down(self, why: str) -> None:
            pass  # nothing of it has begun

        def instance_lost(self, why: str) -> bool:
            self.why = why
            return True

    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request, listener = await runtime.intake.place(tools.request(LONG, path=path)), Listener()
    lost = request.instance_id
    request.loss_notifier.watch(lost, listener)

    await store.pool("default").members.set_instance_state(lost, InstanceState.DOWN)
    await clock.advance(VIEW_POLL_S + 0.1)
    assert listener.why == f"instance {lost} was taken down"

    await request.failed(InstanceFailure(FailureKind.DOWN, listener.why))
    assert request.instance_id != lost
    assert (await loads(store))[lost].pending_tokens == 0
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_attempts_are_limited(start_runtime: Any, store: Any) -> None:
    instances = tuple(tools.spec(name) for name in "abcd")
    runtime = await start_runtime(instances=instances, max_attempts=2)
    request = await runtime.intake.place(tools.request())
    await request.failed(REFUSED)

    with pytest.raises(UpstreamError, match="connection refused"):
        await request.failed(REFUSED)

    assert await nothing_is_left(store, runtime)


async def test_retries_stop_when_their_budget_is_spent(start_runtime: Any, store: Any) -> None:
    instances = tuple(tools.spec(name) for name in "abcd")
    runtime = await start_runtime(instances=instances)
    tools.no_retries(runtime)
    request = await runtime.intake.place(tools.request())

    with pytest.raises(UpstreamError, match="budget"):
        await request.failed(InstanceFailure(FailureKind.CLOSED, "the connection broke"))

    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_a_refused_connection_takes_nothing_from_the_budget(start_runtime: Any, path: str) -> None:
    instances = tuple(tools.spec(name) for name in "abcd")
    runtime = await start_runtime(instances=instances)
    tools.no_retries(runtime)
    request = await runtime.intake.place(tools.request(path=path))

    await request.failed(REFUSED)
    await request.failed(REFUSED)
    assert request.tries == 3
    with pytest.raises(UpstreamError, match="3 instances failed"):
        await request.failed(REFUSED)


async def test_when_every_instance_failed_the_last_failure_is_told(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request())

    with pytest.raises(UpstreamTimeoutError, match="no other instance is ready"):
        await request.failed(InstanceFailure(FailureKind.TIMEOUT, "no first byte"))

    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_an_error_tells_instances_that_failed_from_instances_that_are_not_ready(
    start_runtime: Any, path: str
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(path=path))
    await request.failed(REFUSED)

    with pytest.raises(UpstreamError, match="every ready instance failed"):
        await request.failed(REFUSED)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_a_request_that_two_engines_died_of_is_not_tried_on_a_third(
    start_runtime: Any, store: Any, path: str
) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    request = await runtime.intake.place(tools.request("deadly", path=path, body_hash=7))
    await request.failed(DEAD)

    with pytest.raises(UpstreamError, match="engines died"):
        await request.failed(DEAD)
    with pytest.raises(RequestQuarantinedError):
        await runtime.intake.place(tools.request("deadly", path=path, body_hash=7))

    innocent = await runtime.intake.place(tools.request("innocent", path=path, body_hash=8))
    innocent.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_engines_that_restart_behind_a_proxy_quarantine_nothing(start_runtime: Any, path: str) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    closed = InstanceFailure(FailureKind.CLOSED, "the connection broke", still_accepts=True)
    for number in range(20):
        request = await runtime.intake.place(tools.request(f"prompt {number % 3}", path=path, body_hash=number % 3))
        with pytest.raises(UpstreamError, match="3 instances failed"):
            while True:
                await request.failed(closed)

    request = await runtime.intake.place(tools.request("prompt 0", path=path, body_hash=0))
    request.finish(Outcome.COMPLETED)
    assert not runtime.pools.pools["default"].evidence.quarantine.suspects


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_an_engine_that_died_of_an_answer_that_had_begun_counts_too(start_runtime: Any, path: str) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    request = await runtime.intake.place(tools.request("deadly", path=path))
    await request.failed(DEAD)
    request.first_token()
    request.broke_off(DEAD)
    request.finish(Outcome.UPSTREAM_FAILED)

    with pytest.raises(RequestQuarantinedError):
        await runtime.intake.place(tools.request("deadly", path=path))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_copies_wait_for_the_first_that_is_tried_again_and_follow_its_token(
    start_runtime: Any, store: Any, path: str
) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    trial = await runtime.intake.place(tools.request("same", path=path))
    await trial.failed(DEAD)
    copies = [asyncio.create_task(runtime.intake.place(tools.request("same", path=path))) for _ in range(3)]
    await tools.settle()
    assert not any(copy.done() for copy in copies)

    trial.first_token()

    for request in (trial, *(await asyncio.gather(*copies))):
        request.finish(Outcome.COMPLETED)
    assert runtime.pools.pools["default"].evidence.quarantine.of(trial.machine.spec.prompt_hash, 0.0) is None
    assert await nothing_is_left(store, runtime)


async def test_a_client_that_leaves_while_it_waits_for_a_trial_leaves_nothing(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    first = await runtime.intake.place(tools.request("same"))
    await first.failed(DEAD)
    copy = asyncio.create_task(runtime.intake.place(tools.request("same")))
    await tools.settle()
    assert not copy.done()

    copy.cancel()
    await asyncio.wait((copy,))
    first.finish(Outcome.CLIENT_GONE)

    assert await nothing_is_left(store, runtime)


async def test_a_cancelled_retry_leaves_nothing(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    retry = asyncio.create_task(requests[0].failed(REFUSED))
    await tools.settle()
    assert not retry.done()  # held for the other instance, which is full

    retry.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retry

    requests[1].finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_an_instance_that_keeps_failing_is_given_nothing_until_it_is_probed(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    tools.break_after(runtime, faults=3)

    failures = 0
    while failures < 3:
        request = await runtime.intake.place(tools.request(f"prompt {failures} of its own"))
        if request.instance_id == "a":
            failures += 1
            await request.failed(REFUSED)

    assert {(await runtime.intake.place(tools.request())).instance_id for _ in range(5)} == {"b"}
    await clock.advance(5.1)
    probes = [await runtime.intake.place(tools.request(f"later {number}")) for number in range(4)]
    assert [request.instance_id for request in probes].count("a") == 1


async def test_client_errors_never_open_a_breaker(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    tools.break_after(runtime, faults=1)

    for _ in range(10):
        request = await runtime.intake.place(tools.request())
        request.finish(Outcome.CLIENT_ERROR)
        request = await runtime.intake.place(tools.request())
        await request.failed(InstanceFailure(FailureKind.STATUS, "slow down", 429))
        request.finish(Outcome.COMPLETED)

    assert runtime.pools.pools["default"].evidence.breakers.states() == {}


async def test_the_only_instance_is_sent_requests_whatever_it_did(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    tools.break_after(runtime, faults=1)
    request = await runtime.intake.place(tools.request())
    request.broke_off(DEAD)
    request.finish(Outcome.UPSTREAM_FAILED)
    assert runtime.pools.pools["default"].evidence.breakers.states() == {}, "without a peer it is not ejected"

    request = await runtime.intake.place(tools.request())

    assert request.instance_id == "a"
    request.finish(Outcome.COMPLETED)


# ids, names and other paths --------------------------------------------------------------------------------------


async def test_an_id_that_is_live_on_this_replica_gets_a_suffix(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    first = await runtime.intake.place(tools.request(request_id="mine"))

    second = await runtime.intake.place(tools.request(request_id="mine"))

    assert first.request_id == "mine"
    assert second.request_id.startswith("mine-")
    assert len(await live(store)) == 2
    for request in (first, second):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_an_id_whose_release_is_on_its_way_gets_a_suffix(start_runtime: Any, store: Any) -> None:
    tampered, goes = tools.Tampered(store), asyncio.Event()
    runtime = await start_runtime(instances=(tools.spec("a"),), through=lambda _: tampered)

    async def waits(*_: Any, **__: Any) -> None:
        await goes.wait()

    tampered.before["release"] = waits
    first = await runtime.intake.place(tools.request(request_id="mine"))
    first.finish(Outcome.CLIENT_GONE)

    second = await runtime.intake.place(tools.request(request_id="mine"))
    goes.set()
    await tools.settle()
    third = await runtime.intake.place(tools.request(request_id="mine"))

    assert second.request_id.startswith("mine-")
    assert third.request_id == "mine"
    assert set(await live(store)) == {second.request_id, third.request_id}
    for request in (second, third):
        request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_who_leaves_before_its_id_is_known_to_be_taken_releases_nothing_of_the_other_replica(
    start_runtime: Any, store: Any
) -> None:
    tampered = tools.Tampered(store)
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime(through=lambda _: tampered)
    first = await one.intake.place(tools.request(request_id="same"))
    reserving = asyncio.Event()

    async def under_way(*_: Any) -> None:
        reserving.set()
        await asyncio.Event().wait()

    tampered.before["place"] = under_way
    leaving = asyncio.create_task(other.intake.place(tools.request(request_id="same")))
    await reserving.wait()
    leaving.cancel()
    await tools.settle()

    assert "release" in tampered.calls
    assert (await store.pool("default").records(["same"]))["same"].replica_id == "replica-1"
    first.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, one)


async def test_an_id_that_is_live_on_another_replica_gets_a_suffix(start_runtime: Any, store: Any) -> None:
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime()
    first = await one.intake.place(tools.request(request_id="mine"))

    second = await other.intake.place(tools.request(request_id="mine"))

    assert second.request_id.startswith("mine-")
    second.finish(Outcome.COMPLETED)
    assert other.context.decisions.get(second.request_id) is not None
    await tools.settle()
    assert await live(store) == {"mine": RequestState.DISPATCHED}
    first.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, other)


async def test_a_refusal_tells_the_id_that_the_request_is_explained_by(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", max_queued_requests=0),))
    first = await runtime.intake.place(tools.request(LONG, request_id="mine"))

    with pytest.raises(QueueFullError) as refused:
        await runtime.intake.place(tools.request(f"2 {LONG}", request_id="mine"))

    second_id = refused.value.request_id
    assert second_id is not None and second_id.startswith("mine-")
    assert runtime.context.decisions.get(second_id) is not None
    first.finish(Outcome.COMPLETED)


async def test_an_alias_shares_the_models_cache_and_an_adapter_does_not(start_runtime: Any) -> None:
    pool = PoolSettings(model="base", aliases=("gpt",), loras=("tuned",))
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=(pool,))

    requests = {name: await runtime.intake.place(tools.request(model=name)) for name in ("base", "gpt")}
    requests["tuned"] = await runtime.intake.place(tools.request(model="tuned"))

    assert [requests[name].model for name in ("base", "gpt", "tuned")] == ["base", "base", "tuned"]
    keys = {name: request.explain().hash_key for name, request in requests.items()}
    assert keys["base"] == keys["gpt"] != keys["tuned"]
    for request in requests.values():
        request.finish(Outcome.COMPLETED)


async def test_other_paths_are_passed_without_a_reservation(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))

    request = await runtime.intake.place(tools.request(path="/tokenize"))

    assert request.instance_id in ("a", "b")
    assert await live(store) == {}
    failed = request.instance_id
    await request.failed(REFUSED)
    assert request.instance_id != failed
    with pytest.raises(UpstreamError):
        await request.failed(REFUSED)
    assert await nothing_is_left(store, runtime)


# the agents' APIs ------------------------------------------------------------------------------------------------
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

    assert second.instance_id == first.instance_id
    assert second.expected_cached_tokens > 900
    for request in (first, second):
        request.finish(Outcome.COMPLETED)


async def test_a_response_is_continued_by_the_instance_that_stored_it(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    body = {"input": "and then?"}
    for wanted in "abcd":
        pinned = tools.request(path="/v1/responses", body=body, pinned_to=wanted)
        placed = await runtime.intake.place(pinned)
        (record,) = (await store.pool("default").snapshot()).requests
        assert (placed.instance_id, record.instance_id, record.pinned) == (wanted, wanted, True)
        placed.finish(Outcome.COMPLETED)
        await tools.settle()

    gone = await runtime.intake.place(tools.request(path="/v1/responses", body=body, pinned_to="gone"))

    assert gone.instance_id in "abcd"
    gone.finish(Outcome.COMPLETED)


async def test_a_continued_response_counts_the_conversation_that_is_stored(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    asked: dict[str, Any] = {"path": "/v1/responses", "body": {"input": "and then?"}, "leaves_id_open": True}
    first = await runtime.intake.place(tools.request(**asked, stores=True))
    first.finish(Outcome.COMPLETED, Usage(prompt_tokens=2000, output_tokens=300))
    unstored = await runtime.intake.place(tools.request(**asked))
    unstored.finish(Outcome.COMPLETED, Usage(prompt_tokens=2000, output_tokens=300))
    await tools.settle()

    def continuing(request: Any) -> Any:
        return tools.request(**asked, pinned_to="a", continues=response_id(request.request_id, "a"))

    unknown = await runtime.intake.place(continuing(unstored))
    before = (await loads(store))["a"]
    known = await runtime.intake.place(continuing(first))
    after = (await loads(store))["a"]

    assert after.pending_tokens - before.pending_tokens == before.pending_tokens
    assert after.context_tokens - before.context_tokens == before.context_tokens + 2300
    assert (unknown.expected_cached_tokens, known.expected_cached_tokens) == (0, 2300)
    told = known.explain().prompt_tokens
    assert told == 2300 + known.machine.spec.chain.prompt_tokens
    for request in (known, unknown):
        request.finish(Outcome.COMPLETED)


async def test_a_stored_conversation_has_the_slo_of_its_length(start_runtime: Any, store: Any) -> None:
    by_length = {"slo_ttft_s_per_1k_tokens": 1.0, "slo_ttft_max_s": 60.0}
    await store.pool("default").settings.change(by_length, by="operator")
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await store.pool("default").responses.keep("resp_1@a", 20_000)
    body = {"input": "and then?"}
    slos_s = []
    for continued in (None, "resp_1@a"):
        asked = tools.request(path="/v1/responses", body=body, pinned_to="a", continues=continued)
        placed = await runtime.intake.place(asked)
        slos_s.append(placed.machine.spec.slo_s)
        placed.finish(Outcome.COMPLETED)
    assert slos_s[1] - slos_s[0] == pytest.approx(20.0)


async def test_a_stored_response_is_asked_of_the_instance_that_stored_it_and_of_no_other(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    for wanted in "abcd":
        stored = tools.request(path=f"/v1/responses/resp_1@{wanted}", model="", pinned_to=wanted)
        placed = await runtime.intake.place(stored)
        assert placed.instance_id == wanted
        with pytest.raises(UpstreamError):
            await placed.failed(REFUSED)

    with pytest.raises(NotFoundError, match="not in the fleet"):
        await runtime.intake.place(tools.request(path="/v1/responses/resp_1@e", model="", pinned_to="e"))
    assert len(runtime.context.live) == 0


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


async def test_embeddings_go_by_load_and_claim_no_cache(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    body = {"input": ["some text"] * 10}
    placed = [await runtime.intake.place(tools.request(path="/v1/embeddings", body=body)) for _ in range(6)]

    snapshot = await store.pool("default").snapshot()

    assert {request.instance_id for request in placed} == {"a", "b"}
    assert [request.expected_cached_tokens for request in placed] == [0] * 6
    assert all(load.pending_tokens > 0 for load in snapshot.loads.values())
    for request in placed:
        request.finish(Outcome.COMPLETED)
