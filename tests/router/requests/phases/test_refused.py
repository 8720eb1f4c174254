"""Refused: before anything is reserved."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.errors import (
    NoInstanceError,
    QueueFullError,
    ReplicaFullError,
    UnknownModelError,
)
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, nothing_is_left


async def test_an_unknown_model_is_refused_by_name(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    with pytest.raises(UnknownModelError, match="'gpt-9'"):
        await runtime.intake.place(tools.request(model="gpt-9"))


async def test_without_a_ready_instance_the_answer_is_503(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.DOWN),))

    with pytest.raises(NoInstanceError) as refused:
        await runtime.intake.place(tools.request())

    assert refused.value.retry_after_s is not None
    assert await nothing_is_left(store, runtime)


async def test_an_instance_that_became_ready_a_moment_ago_is_found(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.STARTING),))
    await store.pool("default").members.set_instance_state("a", InstanceState.READY)

    request = await runtime.intake.place(tools.request())

    assert request.machine.instance_id == "a"
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
