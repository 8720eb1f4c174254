"""The metrics of a replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from dualmap.router.errors import ReplicaFullError
from dualmap.router.telemetry.metrics import RouterMetrics, measured
from dualmap.router.telemetry.traffic import TrafficCounts
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools
from tests.support.manual_clock import settle


def sample(runtime: Any, name: str, **labels: str) -> float | None:
    value: float | None = runtime.context.metrics.registry.get_sample_value(name, labels)
    return value


def test_every_registry_is_its_own_and_the_global_one_stays_untouched() -> None:
    before = {metric.name for metric in REGISTRY.collect()}
    first, second = RouterMetrics(["default"]), RouterMetrics(["default"])

    first.refused(503, "no_instance")

    refusals = "dualmap_refusals_total"
    assert first.registry.get_sample_value(refusals, {"code": "no_instance"}) == 1.0
    assert second.registry.get_sample_value(refusals, {"code": "no_instance"}) is None
    assert {metric.name for metric in REGISTRY.collect()} == before


async def test_a_failed_store_call_is_counted_and_timed() -> None:
    metrics = RouterMetrics(["default"])

    async def away() -> None:
        raise StoreUnavailableError("away")

    with pytest.raises(StoreUnavailableError):
        await measured(metrics.store_calls["observe"], away())

    assert metrics.registry.get_sample_value("dualmap_store_errors_total", {"call": "observe"}) == 1.0
    assert metrics.registry.get_sample_value("dualmap_store_call_seconds_count", {"call": "observe"}) == 1.0


async def test_the_story_of_a_request_is_counted(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request("x" * 400))
    assert sample(runtime, "dualmap_inflight_requests", pool="default") == 1.0
    await request.failed(Failed(InstanceFailure(FailureKind.CONNECT)))
    await clock.advance(6.0)
    request.first_token()
    request.finish(Outcome.COMPLETED)

    assert sample(runtime, "dualmap_retries_total", pool="default", failure="connect") == 1.0
    assert sample(runtime, "dualmap_ttft_seconds_sum", pool="default") == pytest.approx(6.0)
    assert sample(runtime, "dualmap_slo_total", pool="default", slo="missed") == 1.0
    assert sample(runtime, "dualmap_decision_seconds_count", pool="default") == 1.0
    assert sample(runtime, "dualmap_prompt_tokens_total", pool="default", by="expected") == 100.0
    assert sample(runtime, "dualmap_inflight_requests", pool="default") == 0.0


async def test_what_tiers_had_is_counted_by_what_the_prices_decided(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", kv_capacity_tokens=256),))
    for token_s in (1e-6, 1e-6, 1e-2):
        tiers = InstanceTiers((InstanceTier(Tier.HOST, 10_000, LoadPrice(0.0, token_s)),))
        await store.pool("default").tiers.describe("a", tiers)
        request = await runtime.intake.place(tools.request("x" * 6000))
        request.first_token()
        request.finish(Outcome.COMPLETED)

    assert sample(runtime, "dualmap_tier_tokens_total", pool="default", tier="host", by="loaded") == (93 - 16) * 16.0
    assert sample(runtime, "dualmap_tier_tokens_total", pool="default", tier="host", by="computed") == (93 - 16) * 16.0
    counts = TrafficCounts.of(runtime.pools.pools["default"].metrics)
    assert (counts.by_tier, counts.forgone_tokens) == ({"host": (93 - 16) * 16}, (93 - 16) * 16)


@pytest.mark.parametrize("scheduling", [SchedulingSettings(policy="dualmap-least-cost", block_tokens=16)])
async def test_what_is_pulled_is_counted(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    for name in ("a", "b"):
        end = PullEnd(name, 5710, "x", LoadPrice(0.0, 1e-6))
        await store.pool("default").tiers.describe(name, InstanceTiers(pulls=end))
    first = await runtime.intake.place(tools.request("x" * 6000))
    first.first_token()
    first.finish(Outcome.COMPLETED)
    await settle()
    await store.pool("default").members.set_instance_state(first.machine.instance_id, InstanceState.DRAINING)
    asked = tools.request("x" * 6000)
    asked.may_pull = True
    request = await runtime.intake.place(asked)
    request.first_token()
    request.finish(Outcome.COMPLETED)

    assert request.machine.instance_id != first.machine.instance_id
    assert sample(runtime, "dualmap_tier_tokens_total", pool="default", tier="peer", by="pulled") == 93 * 16.0
    assert TrafficCounts.of(runtime.pools.pools["default"].metrics).by_tier == {"peer": 93 * 16}


async def test_the_error_of_the_estimate_is_counted_at_the_first_token(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request("x" * 4000))
    assert request.machine.expected_ttft_s == pytest.approx(1.0), "1,000 tokens at 1,000 a second"
    await clock.advance(1.25)
    request.first_token()
    request.first_token()
    request.finish(Outcome.COMPLETED)

    seconds, ratio = "dualmap_ttft_estimate_error_seconds", "dualmap_ttft_estimate_error_ratio"
    assert sample(runtime, f"{seconds}_sum", pool="default") == pytest.approx(0.25)
    assert sample(runtime, f"{ratio}_sum", pool="default") == pytest.approx(0.25 / 1.25)
    assert sample(runtime, f"{ratio}_count", pool="default") == 1.0
    assert (request.explain().expected_ttft_s, request.explain().course.first_token_s) == pytest.approx((1.0, 1.25))


async def test_a_request_that_was_placed_again_or_does_not_stream_says_nothing_of_the_estimate(
    start_runtime: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    again = await runtime.intake.place(tools.request("x" * 400))
    await again.failed(Failed(InstanceFailure(FailureKind.CONNECT)))
    whole = await runtime.intake.place(tools.request("y" * 400, stream=False))
    await clock.advance(2.0)
    again.first_token()
    for request in (again, whole):
        request.finish(Outcome.COMPLETED)

    assert again.machine.expected_ttft_s is None
    assert sample(runtime, "dualmap_ttft_seconds_count", pool="default") == 1.0
    assert sample(runtime, "dualmap_ttft_estimate_error_ratio_count", pool="default") == 0.0


async def test_what_a_full_outbox_drops_is_counted(start_runtime: Any) -> None:
    runtime = await start_runtime()
    outbox = runtime.pools.pools["default"].outbox
    outbox._limit = 16

    for number in range(20):
        outbox.post(Release(f"r{number}"))

    assert sample(runtime, "dualmap_outbox_dropped_transitions_total") == 4.0


def on_time(runtime: Any) -> list[float | None]:
    """The counts of requests on time and not, of those not by why, and of those that are overdue now."""
    runtime.read_own_gauges()
    why = [
        sample(runtime, "dualmap_not_on_time_requests_total", pool="default", why=why)
        for why in ("late", "refused", "failed")
    ]
    counts = [sample(runtime, "dualmap_slo_total", pool="default", slo=slo) for slo in ("met", "missed")]
    return [*counts, *why, sample(runtime, "dualmap_overdue_requests", pool="default")]


async def test_a_request_is_late_when_its_deadline_passes_and_counted_once(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    comes, leaves, fails = [await runtime.intake.place(tools.request()) for _ in range(3)]
    await clock.advance(4.9)
    assert on_time(runtime) == [0, 0, 0, 0, 0, 0]
    clock.jump(0.2)
    assert on_time(runtime) == [0, 3, 3, 0, 0, 3], "at the time of reading, whatever the timer does"

    comes.first_token()
    assert on_time(runtime) == [0, 3, 3, 0, 0, 2]
    comes.finish(Outcome.COMPLETED)
    leaves.finish(Outcome.CLIENT_GONE)
    fails.finish(Outcome.UPSTREAM_FAILED)
    await clock.advance(60.0)
    assert on_time(runtime) == [0, 3, 3, 0, 0, 0]


async def test_clients_that_leave_in_time_are_neither_and_what_the_fleet_fails_or_refuses_is_not_on_time(
    start_runtime: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), max_requests=4)
    prompt, leaves, fails, other = [await runtime.intake.place(tools.request()) for _ in range(4)]
    with pytest.raises(ReplicaFullError):
        await runtime.intake.place(tools.request())
    prompt.first_token()
    for each, outcome in (
        (prompt, Outcome.COMPLETED), (leaves, Outcome.CLIENT_GONE), (fails, Outcome.UPSTREAM_FAILED),
        (other, Outcome.CLIENT_ERROR),
    ):  # fmt: skip
        each.finish(outcome)
    await clock.advance(60.0)

    assert on_time(runtime) == [1, 2, 0, 1, 1, 0]
    assert sample(runtime, "dualmap_arrived_requests_total", pool="default") == 5.0


async def test_a_request_whose_first_token_is_not_seen_is_late_where_its_prefill_is_not_presumed_over(
    start_runtime: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", dispatch_window_tokens=100),))
    sent = await runtime.intake.place(tools.request("x" * 400, stream=False))
    sent.sent()
    held = asyncio.create_task(runtime.intake.place(tools.request("y" * 4000, stream=False)))
    await settle()
    held.cancel()
    await settle()
    assert on_time(runtime) == [0, 0, 0, 0, 0, 0], "it left in time"
    held = asyncio.create_task(runtime.intake.place(tools.request("z" * 40_000, stream=False)))
    await clock.advance(6.0)
    (await held).sent()
    assert on_time(runtime) == [1, 1, 1, 0, 0, 1]

    await clock.advance(60.0)
    assert on_time(runtime) == [1, 1, 1, 0, 0, 0], "its prefill is presumed to be over"
    sent.finish(Outcome.COMPLETED)
    (await held).finish(Outcome.COMPLETED)
    assert on_time(runtime) == [1, 1, 1, 0, 0, 0]


async def test_the_page_can_be_rendered_with_the_fleets_gauges(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request("x" * 4000))

    await runtime.read_metrics()
    page = generate_latest(runtime.context.metrics.registry).decode()

    assert 'dualmap_instance_pending_tokens{instance="a",pool="default"} 1000.0' in page
    assert 'dualmap_replicas{pool="default"} 1.0' in page
    request.finish(Outcome.COMPLETED)


def test_the_error_of_cached_tokens_is_counted_once_an_instance_reports_them() -> None:
    metrics = RouterMetrics(["default"])
    pool = metrics.pools["default"]

    pool.compare_cached(600, None)
    pool.compare_cached(110, 100)
    pool.compare_cached(600, None)

    name, labels = "dualmap_cached_tokens_error_tokens", {"pool": "default"}
    read = metrics.registry.get_sample_value
    assert (read(f"{name}_count", labels), read(f"{name}_sum", labels)) == (2.0, 610.0)
    assert read(f"{name}_bucket", labels | {"le": "16.0"}) == 1.0


async def test_a_whole_answer_is_counted_with_its_time_per_output_token(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    for usage, outcome in (
        (Usage(prompt_tokens=100, output_tokens=41), Outcome.COMPLETED),
        (Usage(prompt_tokens=100, output_tokens=1), Outcome.COMPLETED),
        (None, Outcome.COMPLETED),
        (Usage(prompt_tokens=100, output_tokens=9), Outcome.CLIENT_GONE),
    ):
        request = await runtime.intake.place(tools.request("x" * 400))
        await clock.advance(1.0)
        request.first_token()
        await clock.advance(2.0)
        request.finish(outcome, usage)

    assert sample(runtime, "dualmap_request_seconds_count", pool="default") == 3.0
    assert sample(runtime, "dualmap_request_seconds_sum", pool="default") == pytest.approx(9.0)
    assert sample(runtime, "dualmap_output_tokens_total", pool="default") == 42.0
    assert sample(runtime, "dualmap_time_per_output_token_seconds_count", pool="default") == 1.0
    assert sample(runtime, "dualmap_time_per_output_token_seconds_sum", pool="default") == pytest.approx(0.05)
