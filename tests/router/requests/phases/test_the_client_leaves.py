"""The client leaves: nothing is left, in whatever phase."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import Outcome
from tests.router import tools
from tests.router.requests.phases.fleets import DEAD, LONG, REFUSED, full_fleet, nothing_is_left


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


async def test_a_client_that_leaves_while_it_waits_for_a_trial_leaves_nothing(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    first = await runtime.intake.place(tools.request("same"))
    await first.failed(Failed(DEAD))
    copy = asyncio.create_task(runtime.intake.place(tools.request("same")))
    await tools.settle()
    assert not copy.done()

    copy.cancel()
    await asyncio.wait((copy,))
    first.finish(Outcome.CLIENT_GONE)

    assert await nothing_is_left(store, runtime)


async def test_a_cancelled_retry_leaves_nothing(start_runtime: Any, store: Any) -> None:
    runtime, requests = await full_fleet(start_runtime)
    retry = asyncio.create_task(requests[0].failed(Failed(REFUSED)))
    await tools.settle()
    assert not retry.done()  # held for the other instance, which is full

    retry.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retry

    requests[1].finish(Outcome.COMPLETED)
    assert await nothing_is_left(store, runtime)
