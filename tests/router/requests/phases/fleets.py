"""Fleets that are full, and what is left of requests."""

from __future__ import annotations

from typing import Any

from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.state.request import RequestState
from tests.router import tools

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
    assert {request.machine.instance_id for request in requests} == {"a", "b"}
    return runtime, requests
