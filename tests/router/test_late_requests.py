"""What becomes of requests that no instance is expected to answer in time."""

from __future__ import annotations

from typing import Any

import pytest

from router.errors import SloUnreachableError, error_headers
from router.outcome import FailureKind, InstanceFailure, Outcome

LONG = "word " * 3200
"""4000 tokens: four seconds on an idle instance."""


def spec_with_room(tools: Any, name: str) -> Any:
    """An instance that holds nothing back."""
    return tools.spec(name, dispatch_window_tokens=100_000)


async def test_a_late_request_is_served_unless_the_operator_says_otherwise(start_runtime: Any, tools: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.lifecycle.place(tools.request(LONG, slo_s=1.0))

    assert request.instance_id == "a"


async def test_a_request_that_would_be_late_is_refused_before_anything_is_reserved(
    start_runtime: Any, store: Any, tools: Any
) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"),),
        late_requests="refuse",
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )
    first = await runtime.lifecycle.place(tools.request(LONG))
    tampered[0].calls.clear()

    with pytest.raises(SloUnreachableError, match="x-slo-ttft-ms") as refused:
        await runtime.lifecycle.place(tools.request(f"other {LONG}"))

    assert refused.value.status == 503
    assert refused.value.retry_after_s == pytest.approx(4.0), "when the work ahead is done"
    assert error_headers(refused.value)["retry-after"] == "4"
    assert tampered[0].calls == ["observe"]
    outcomes = runtime.pools.pools["default"].metrics.outcomes
    assert outcomes[Outcome.REFUSED].value == 1
    first.finish(Outcome.COMPLETED)
    await runtime.context.outbox.flush(1.0)
    assert (await store.pool("default").snapshot()).requests == ()


async def test_a_request_with_time_enough_is_taken(start_runtime: Any, tools: Any) -> None:
    runtime = await start_runtime(instances=(spec_with_room(tools, "a"),), late_requests="refuse")
    await runtime.lifecycle.place(tools.request(LONG))

    with pytest.raises(SloUnreachableError):
        await runtime.lifecycle.place(tools.request("short", slo_s=3.0))
    request = await runtime.lifecycle.place(tools.request("short", slo_s=6.0))

    assert request.instance_id == "a"


async def test_a_request_that_was_taken_once_is_not_refused_when_its_instance_fails(
    start_runtime: Any, tools: Any
) -> None:
    runtime = await start_runtime(
        instances=(spec_with_room(tools, "a"), spec_with_room(tools, "b")), late_requests="refuse"
    )
    taken = await runtime.lifecycle.place(tools.request("short", slo_s=2.0))
    (other_id,) = {"a", "b"} - {taken.instance_id}
    for number in range(4):  # by now both are busy for longer than the request has
        await runtime.lifecycle.place(tools.request(f"{number} {LONG}", slo_s=60.0))

    await taken.reroute(InstanceFailure(FailureKind.CONNECT, "connection refused"))

    assert taken.instance_id == other_id
