"""Passed on: the machine without a reservation. Where such requests go, and what they are refused with."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.errors import (
    InvalidRequestError,
    NoInstanceError,
    UpstreamError,
)
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState, Role
from tests.router import tools
from tests.router.requests.phases.fleets import REFUSED, live, nothing_is_left


async def test_without_a_ready_instance_it_is_refused_like_a_scheduled_request(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.DOWN),))

    refusals = []
    for path in ("/v1/completions", "/v1/embeddings"):
        with pytest.raises(NoInstanceError) as refused:
            await runtime.intake.place(tools.request(path=path))
        refusals.append((refused.value.message, refused.value.retry_after_s))

    assert refusals == [("no instance of pool 'default' is ready; see /admin/instances", 2.0)] * 2


@pytest.mark.parametrize(
    ("roles", "takers"),
    [
        ({"p": Role.PREFILL, "d": Role.DECODE}, {"d"}),
        ({"p": Role.PREFILL, "m": Role.MIXED}, {"m"}),
        ({"p": Role.PREFILL, "m": Role.MIXED, "d": Role.DECODE}, {"m", "d"}),
        ({"p": Role.PREFILL, "q": Role.PREFILL}, {"p", "q"}),
    ],
)
@pytest.mark.parametrize(
    "path", ["/inference/v1/generate", "/v1/chat/completions/batch", "/v1/chat/completions", "/new"]
)
async def test_whole_requests_go_where_answers_are_decoded(
    start_runtime: Any, roles: dict[str, Role], takers: set[str], path: str
) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name, role=role) for name, role in roles.items()))

    placed = [await runtime.intake.place(tools.request(path=path, prompt=None)) for _ in range(8)]

    assert {request.machine.instance_id for request in placed} == takers


async def test_a_body_that_cannot_be_read_is_refused_only_where_it_must_say_its_pool(start_runtime: Any) -> None:
    pools = (PoolSettings(), PoolSettings(name="other", model="other"))
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=pools)
    unread = {"prompt": None, "unread": "the body is not valid JSON"}

    with pytest.raises(InvalidRequestError, match="not valid JSON, so its model is not known; name a model"):
        await runtime.intake.place(tools.request(model="", **unread))
    assert (await runtime.intake.place(tools.request(model="other", **unread))).pool.settings.name == "other"


async def test_other_paths_are_passed_without_a_reservation(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))

    request = await runtime.intake.place(tools.request(path="/tokenize"))

    assert request.machine.instance_id in ("a", "b")
    assert await live(store) == {}
    failed = request.machine.instance_id
    await request.failed(Failed(REFUSED))
    assert request.machine.instance_id != failed
    with pytest.raises(UpstreamError):
        await request.failed(Failed(REFUSED))
    assert await nothing_is_left(store, runtime)


async def test_embeddings_go_by_load_and_claim_no_cache(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    body = {"input": ["some text"] * 10}
    placed = [await runtime.intake.place(tools.request(path="/v1/embeddings", body=body)) for _ in range(6)]

    snapshot = await store.pool("default").snapshot()

    assert {request.machine.instance_id for request in placed} == {"a", "b"}
    assert [request.expected_cached_tokens for request in placed] == [0] * 6
    assert all(load.pending_tokens > 0 for load in snapshot.loads.values())
    for request in placed:
        request.finish(Outcome.COMPLETED)
