"""Failed: admitted again, within attempts, budget, quarantine and breakers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.errors import (
    QuotaSpentError,
    RequestQuarantinedError,
    RouterError,
    UpstreamError,
    UpstreamTimeoutError,
)
from dualmap.router.pool.view import POLL_S as VIEW_POLL_S
from dualmap.runtime.tenant_settings import LimitSettings, TenantSettings
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.tenants.tenant import Caller
from tests.router import tools
from tests.router.requests.phases.fleets import DEAD, LONG, REFUSED, loads, nothing_is_left


async def test_a_failed_instance_costs_the_client_nothing(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b"), tools.spec("c")))
    request = await runtime.intake.place(tools.request(LONG))
    first = request.machine.instance_id

    await request.failed(Failed(REFUSED))

    assert request.machine.instance_id == request.explain().rounds[0].decision.alternative_id
    assert request.machine.tries == 2
    assert (await loads(store))[first].pending_tokens == 0
    await request.failed(Failed(REFUSED))
    assert request.machine.tries == 3
    assert request.machine.instance_id not in request.machine.excluded
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_a_request_that_waits_for_an_instance_hears_that_it_went_down(
    start_runtime: Any, store: Any, clock: Any, path: str
) -> None:
    class Listener:
        why = ""

        def instance_leaves(self, why: str) -> None:
            raise AssertionError(why)

        def instance_down(self, why: str) -> None:
            pass  # nothing of it has begun

        def instance_lost(self, why: str) -> bool:
            self.why = why
            return True

    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request, listener = await runtime.intake.place(tools.request(LONG, path=path)), Listener()
    lost = request.machine.instance_id
    request.pool.loss_notifier.watch(lost, listener)

    await store.pool("default").members.set_instance_state(lost, InstanceState.DOWN)
    await clock.advance(VIEW_POLL_S + 0.1)
    assert listener.why == f"instance {lost} was taken down"

    await request.failed(Failed(InstanceFailure(FailureKind.DOWN, listener.why)))
    assert request.machine.instance_id != lost
    assert (await loads(store))[lost].pending_tokens == 0
    request.finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)


async def test_attempts_are_limited(start_runtime: Any, store: Any) -> None:
    instances = tuple(tools.spec(name) for name in "abcd")
    runtime = await start_runtime(instances=instances, max_attempts=2)
    request = await runtime.intake.place(tools.request())
    await request.failed(Failed(REFUSED))

    with pytest.raises(UpstreamError, match="connection refused"):
        await request.failed(Failed(REFUSED))

    assert await nothing_is_left(store, runtime)


async def test_retries_stop_when_their_budget_is_spent(start_runtime: Any, store: Any) -> None:
    instances = tuple(tools.spec(name) for name in "abcd")
    runtime = await start_runtime(instances=instances)
    tools.no_retries(runtime)
    request = await runtime.intake.place(tools.request())

    with pytest.raises(UpstreamError, match="budget"):
        await request.failed(Failed(InstanceFailure(FailureKind.CLOSED, "the connection broke")))

    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_a_refused_connection_takes_nothing_from_the_budget(start_runtime: Any, path: str) -> None:
    instances = tuple(tools.spec(name) for name in "abcd")
    runtime = await start_runtime(instances=instances)
    tools.no_retries(runtime)
    request = await runtime.intake.place(tools.request(path=path))

    await request.failed(Failed(REFUSED))
    await request.failed(Failed(REFUSED))
    assert request.machine.tries == 3
    with pytest.raises(UpstreamError, match="3 instances failed"):
        await request.failed(Failed(REFUSED))


async def test_when_every_instance_failed_the_last_failure_is_told(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request())

    with pytest.raises(UpstreamTimeoutError, match="no other instance is ready"):
        await request.failed(Failed(InstanceFailure(FailureKind.TIMEOUT, "no first byte")))

    assert await nothing_is_left(store, runtime)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_an_error_tells_instances_that_failed_from_instances_that_are_not_ready(
    start_runtime: Any, path: str
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(path=path))
    await request.failed(Failed(REFUSED))

    with pytest.raises(UpstreamError, match="every ready instance failed"):
        await request.failed(Failed(REFUSED))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_a_request_that_two_engines_died_of_is_not_tried_on_a_third(
    start_runtime: Any, store: Any, path: str
) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    request = await runtime.intake.place(tools.request("deadly", path=path, body_hash=7))
    await request.failed(Failed(DEAD))

    with pytest.raises(UpstreamError, match="engines died"):
        await request.failed(Failed(DEAD))
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
                await request.failed(Failed(closed))

    request = await runtime.intake.place(tools.request("prompt 0", path=path, body_hash=0))
    request.finish(Outcome.COMPLETED)
    assert not runtime.pools.pools["default"].evidence.quarantine.suspects


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/score"])
async def test_an_engine_that_died_of_an_answer_that_had_begun_counts_too(start_runtime: Any, path: str) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    request = await runtime.intake.place(tools.request("deadly", path=path))
    await request.failed(Failed(DEAD))
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
    await trial.failed(Failed(DEAD))
    copies = [asyncio.create_task(runtime.intake.place(tools.request("same", path=path))) for _ in range(3)]
    await tools.settle()
    assert not any(copy.done() for copy in copies)

    trial.first_token()

    for request in (trial, *(await asyncio.gather(*copies))):
        request.finish(Outcome.COMPLETED)
    assert runtime.pools.pools["default"].evidence.quarantine.of(trial.machine.spec.prompt_hash, 0.0) is None
    assert await nothing_is_left(store, runtime)


async def test_an_instance_that_keeps_failing_is_given_nothing_until_it_is_probed(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    tools.break_after(runtime, faults=3)

    failures = 0
    while failures < 3:
        request = await runtime.intake.place(tools.request(f"prompt {failures} of its own"))
        if request.machine.instance_id == "a":
            failures += 1
            await request.failed(Failed(REFUSED))

    assert {(await runtime.intake.place(tools.request())).machine.instance_id for _ in range(5)} == {"b"}
    await clock.advance(5.1)
    probes = [await runtime.intake.place(tools.request(f"later {number}")) for number in range(4)]
    assert [request.machine.instance_id for request in probes].count("a") == 1


async def test_client_errors_never_open_a_breaker(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    tools.break_after(runtime, faults=1)

    for _ in range(10):
        request = await runtime.intake.place(tools.request())
        request.finish(Outcome.CLIENT_ERROR)
        request = await runtime.intake.place(tools.request())
        await request.failed(Failed(InstanceFailure(FailureKind.STATUS, "slow down", 429)))
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

    assert request.machine.instance_id == "a"
    request.finish(Outcome.COMPLETED)


async def test_no_other_request_takes_the_quota_of_one_that_is_tried_again(start_runtime: Any, store: Any) -> None:
    acme = TenantSettings(name="acme", limits=LimitSettings(requests_per_day=1, requests_in_flight=1))
    caller, tampered = Caller(acme.tenant(), "ci"), tools.Tampered(store)
    runtime = await start_runtime(
        instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered, tenants=(acme,)
    )
    refused: list[type[Exception]] = []

    async def another(releases: Any) -> None:
        if all(each.instance_id == "" for each in releases) and not refused:
            with pytest.raises(RouterError) as error:
                await runtime.intake.place(tools.request(LONG, caller=caller))
            refused.append(error.type)

    request = await runtime.intake.place(tools.request(LONG, caller=caller))
    tampered.after["release"] = another
    await request.failed(Failed(REFUSED))

    assert refused == [QuotaSpentError]
    assert request.machine.tries == 2
    request.sent()
    request.first_token()
    request.finish(Outcome.COMPLETED)
    del tampered.after["release"]
    assert await nothing_is_left(store, runtime)
    pool = store.pool("default")
    assert await pool.usage.budgets("acme", acme.tenant().limits) == [1, 0]
