"""What tenants are charged for requests that a gateway asks about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.picker.messages import BodyMode
from dualmap.router.picker.picked import UNCOUNTED
from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.live_request import LiveRequest
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from tests.router.picker.streams import (
    COMPLETIONS,
    DUPLEX,
    NO_MODE,
    STREAM,
    Gateway,
    answer_body,
    answer_head,
    head,
    prompt,
)
from tests.router.tools import spec
from tests.support.manual_clock import settle

StartRuntime = Callable[..., Awaitable[Runtime]]
LIMITS = {"requests_per_day": 10_000, "prompt_tokens_per_minute": 10**6, "output_tokens_per_minute": 10**6}
TENANT = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),), limits=LIMITS)
TOKEN = b"data: " + orjson.dumps({"choices": [{"text": "x", "finish_reason": None}]}) + b"\n\n"


async def charged(
    start_runtime: StartRuntime, *messages: Any, modes: Any, path: str = COMPLETIONS, **fields: Any
) -> dict[str, int]:
    runtime = await start_runtime(instances=(spec("a", url="http://10.0.0.1:8000"),), tenants=(TENANT,))
    warnings: list[str] = []
    gateway = Gateway(runtime, warn=warnings.append)
    stream, task = gateway.open(
        head(path, modes=modes, authorization="Bearer acme-secret"), prompt("hello", stream=True, **fields)
    )
    await settle()
    (live,) = runtime.context.live
    assert isinstance(live, LiveRequest)
    stream.send(*messages)
    await settle()
    stream.end()
    await settle()
    await task
    machine = live.machine
    drawn, back = machine.spec.claim.draws, machine._returned(machine.outcome)
    kept = dict(zip(drawn.group.names, map(int.__sub__, drawn.costs, back.costs), strict=True))
    assert (warnings == [UNCOUNTED]) is (modes[1] is NO_MODE)
    return {name.split("/")[1]: amount for name, amount in kept.items()}


async def test_without_bodies_a_request_draws_and_keeps_what_it_allows(start_runtime: StartRuntime) -> None:
    kept = await charged(start_runtime, answer_head(fields=STREAM), modes=(DUPLEX, NO_MODE), max_tokens=3000, n=2)
    assert (kept["requests"], kept["output_tokens"]) == (1, 6000)


async def test_without_bodies_what_is_passed_on_draws_what_it_allows_too(start_runtime: StartRuntime) -> None:
    parts = answer_head(fields=STREAM), "/inference/v1/generate"
    fields = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3000}}
    kept = await charged(start_runtime, parts[0], modes=(DUPLEX, NO_MODE), path=parts[1], **fields)
    assert (kept["requests"], kept["output_tokens"]) == (1, 3000)


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, DUPLEX])
async def test_with_bodies_a_stream_that_is_left_is_counted(start_runtime: StartRuntime, mode: BodyMode) -> None:
    parts = [answer_body(TOKEN * 100)] * 20
    kept = await charged(start_runtime, answer_head(fields=STREAM), *parts, modes=(DUPLEX, mode), max_tokens=3000)
    assert (kept["requests"], kept["output_tokens"]) == (1, 2000)


async def test_a_client_that_leaves_before_the_first_byte_pays_for_its_request_and_prompt(
    start_runtime: StartRuntime,
) -> None:
    kept = await charged(start_runtime, modes=(DUPLEX, DUPLEX), max_tokens=3000)
    assert kept["requests"] == 1 and kept["prompt_tokens"] > 0 and kept["output_tokens"] == 0
