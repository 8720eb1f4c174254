"""What tenants are charged, from the client's bytes to the books of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk
from tests.router.tools import spec

StartRuntime = Callable[..., Awaitable[Runtime]]
KEY = "x-api-key: acme-secret\r\n"
USER = {"role": "user", "content": "hi"}
CHAT = {"model": "default", "messages": [USER], "stream": True}


def sse(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def token(text: str) -> bytes:
    return sse({"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


class Fleet:
    """One instance, one router, and one tenant with these limits."""

    def __init__(self, start_instance: Any, start_router: Any, start_runtime: Any) -> None:
        self._start = start_instance, start_router, start_runtime
        self.start_router = start_router
        self.lives: list[Any] = []
        """All requests that were placed, in their order."""

    async def __call__(
        self,
        script: Any,
        *,
        first_byte_timeout_s: float = 600.0,
        draws: Literal["expected", "asked"] = "expected",
        **limits: Any,
    ) -> Fleet:
        start_instance, start_router, start_runtime = self._start
        key = TenantKeySettings(name="ci", key=SecretStr("acme-secret"))
        tenant = TenantSettings(name="acme", keys=(key,), limits=limits, draws=draws)
        other = TenantSettings(name="other", keys=(TenantKeySettings(name="ci", key=SecretStr("others-secret")),))
        instance = await start_instance(script)
        self.runtime = await start_runtime(instances=(spec("one", url=instance.url),), tenants=(tenant, other))
        place = self.runtime.intake.place

        async def placed(request: Any) -> Any:
            live = await place(request)
            self.lives.append(live)
            return live

        self.runtime.intake.place = placed
        self.router = await start_router(
            self.runtime.intake, tenants=self.runtime.tenants, first_byte_timeout_s=first_byte_timeout_s
        )
        return self

    async def live(self) -> Any:
        """The one request that was placed."""
        await kit.eventually(lambda: len(self.lives) == 1)
        return self.lives[0]

    async def kept(self, live: Any) -> dict[str, int]:
        """What a request that is over keeps of its draws."""
        machine = live.machine
        await kit.eventually(lambda: machine.is_done)
        drawn, back = machine.spec.claim.draws, machine._returned(machine.outcome)
        each = zip(drawn.group.names, map(int.__sub__, drawn.costs, back.costs), strict=True)
        return {name.split("/")[1]: amount for name, amount in each}


@pytest.fixture
def fleet(start_instance: StartInstance, start_router: StartRouter, start_runtime: StartRuntime) -> Fleet:
    return Fleet(start_instance, start_router, start_runtime)


async def test_clients_that_leave_before_the_first_byte_do_not_pass_a_limit_of_requests(fleet: Fleet) -> None:
    arrived = asyncio.Semaphore(0)

    async def silent(talk: Talk) -> None:
        arrived.release()
        await talk.until_closed()

    await fleet(silent, requests_per_minute=5)
    statuses = []
    for _ in range(25):
        client = await fleet.router.connect()
        client.request(kit.CHAT, CHAT, headers=KEY)
        answer, came = asyncio.ensure_future(client.answer()), asyncio.ensure_future(arrived.acquire())
        await asyncio.wait((answer, came), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            statuses.append(answer.result().status)
        else:
            answer.cancel()
            client.close()
            await kit.eventually(lambda: len(fleet.runtime.context.live) == 0)
        came.cancel()
        client.close()
    assert statuses == [429] * 20


@pytest.mark.parametrize("events", [1, 40, 3000])
async def test_a_client_that_leaves_a_stream_keeps_what_came(fleet: Fleet, events: int) -> None:
    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        for at in range(events):
            await talk.chunk(token(f"t{at}"))
        await talk.chunk(token("last"))
        await talk.until_closed()

    await fleet(script, prompt_tokens_per_minute=10**6, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    client.request(kit.CHAT, CHAT, headers=KEY)
    live = await fleet.live()
    await client.head()
    while b'"last"' not in await client.chunk():
        pass
    client.close()
    kept = await fleet.kept(live)
    assert live.machine.outcome is Outcome.CLIENT_GONE
    assert kept["output_tokens"] == events + 1 and kept["prompt_tokens"] > 0


@pytest.mark.parametrize("max_tokens", [None, 100_000])
async def test_long_answers_that_miss_the_time_for_their_first_byte_blame_no_instance_and_are_charged(
    fleet: Fleet, max_tokens: int | None
) -> None:
    async def compute(talk: Talk) -> None:
        await talk.until_closed()

    await fleet(compute, first_byte_timeout_s=0.1, prompt_tokens_per_minute=10**6, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    for _ in range(6):  # five faults in a row would eject the instance
        client.request(kit.CHAT, {"model": "default", "messages": [USER], "max_tokens": max_tokens}, headers=KEY)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
        live = fleet.lives[-1]
        assert (await fleet.kept(live))["prompt_tokens"] > 0
        [(_, failure, _)] = live.machine.failures
        assert (failure.kind, live.machine.tries) == (FailureKind.OVERDUE, 1)
    assert not live.machine.rules.evidence.breakers.failing()


@pytest.mark.parametrize("reported", [0, 3, 10**29])
async def test_a_usage_that_no_engine_can_have_charges_neither_less_than_came_nor_more_than_is_possible(
    fleet: Fleet, reported: int
) -> None:
    async def script(talk: Talk) -> None:
        await talk.begin_stream()
        for at in range(100):
            await talk.chunk(token(f"t{at}"))
        await talk.chunk(sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (reported, reported)
        await talk.chunk(b'data: {"choices":[],"usage":%b}\n\n' % usage)
        await talk.end_stream()

    await fleet(script, prompt_tokens_per_minute=10**6, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    client.request(kit.CHAT, {**CHAT, "max_tokens": 150}, headers=KEY)
    live = await fleet.live()
    assert (await client.answer()).whole
    kept = await fleet.kept(live)
    assert kept["output_tokens"] == (150 if reported > 3 else 100)
    assert kept["prompt_tokens"] < 5000


@pytest.mark.parametrize(
    "more",
    [
        {"n": 50},
        {"n": 2, "best_of": 50},
        {"n": 10, "prompt": ["a", "b", "c", "d", "e"]},
        {"n": 10, "prompt": None, "prompt_embeds": ["AAAA"] * 5},
        {"n": 10, "prompt": ["a", "b"], "prompt_embeds": ["AAAA"] * 3},
        {"n": 25, "prompt": "a", "prompt_embeds": "AAAA"},
    ],
)
async def test_all_answers_of_a_request_are_drawn(fleet: Fleet, more: dict[str, Any]) -> None:
    async def silent(talk: Talk) -> None:
        await talk.until_closed()

    await fleet(silent, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    client.request("/v1/completions", {"model": "default", "prompt": "hi", "max_tokens": 10, **more}, headers=KEY)
    live = await fleet.live()
    one = live.machine.spec.expected_output_tokens
    client.close()
    await fleet.kept(live)
    assert live.machine.spec.claim.draws.costs == (50 * one,)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_response_in_the_background_keeps_all_that_it_asks_for(fleet: Fleet, leaves: bool) -> None:
    arrived = asyncio.Event()
    queued: dict[str, Any] = {"id": "resp_x", "object": "response", "status": "queued", "output": [], "usage": None}

    async def script(talk: Talk) -> None:
        arrived.set()
        await (talk.until_closed() if leaves else talk.answer(queued))

    await fleet(script, prompt_tokens_per_minute=10**6, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    body = {"model": "default", "input": "hi", "max_output_tokens": 5000, "background": True}
    client.request("/v1/responses", body, headers=KEY)
    live = await fleet.live()
    if leaves:
        await arrived.wait()
        client.close()
    else:
        assert (await client.answer()).status == 200
    kept = await fleet.kept(live)
    assert kept["output_tokens"] == 5000 and kept["prompt_tokens"] > 0


async def test_a_tenant_whose_settings_say_so_draws_and_keeps_all_that_it_asks_for(fleet: Fleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"choices": []})  # no usage

    await fleet(script, draws="asked", output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    client.request(kit.CHAT, {**CHAT, "stream": False, "max_tokens": 700}, headers=KEY)
    live = await fleet.live()
    assert (await client.answer()).status == 200
    assert live.machine.spec.claim.draws.costs == (700,)
    assert await fleet.kept(live) == {"output_tokens": 700}


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_behind_whatever_a_client_wrote_is_charged(fleet: Fleet, stream: bool) -> None:
    usage = {"input_tokens": 900, "output_tokens": 5000, "total_tokens": 5900}
    whole = {
        "id": "resp_1",
        "object": "response",
        "status": "completed",
        "tools": [{"type": "function", "name": "f", "parameters": {"finish_reason": "abort", "usage": {}}}],
        "text": {"format": {"schema": {"finish_reason": "abort", "status": "cancelled"}}},
        "usage": usage,
        "user": "usage",
        "input_messages": ["usage"] * 60_000,
    }

    async def script(talk: Talk) -> None:
        if not stream:
            await talk.answer(whole)
            return
        await talk.begin_stream()
        for name in ("response.created", "response.completed"):
            await talk.chunk(f"event: {name}\n".encode() + sse({"type": name, "response": whole}))
        await talk.send(b"0\r\n\r\n")

    await fleet(script, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    client.request("/v1/responses", {"model": "default", "input": "x" * 4000, "stream": stream}, headers=KEY)
    live = await fleet.live()
    answer = await client.answer()
    assert answer.status == 200 and answer.headers["x-dualmap-attempts"] == "1"
    assert (await fleet.kept(live))["output_tokens"] == 5000
    assert not fleet.runtime.pools.pools["default"].evidence.breakers.blocked(0.0)


async def test_a_message_that_its_instance_aborted_is_no_answer_and_costs_nothing(fleet: Fleet) -> None:
    async def script(talk: Talk) -> None:
        content = [{"type": "text", "text": "so far"}]
        usage = {"input_tokens": 9, "output_tokens": 112}
        await talk.answer({"type": "message", "role": "assistant", "content": content, "usage": usage})

    await fleet(script, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    client.request("/v1/messages", {"model": "default", "max_tokens": 400, "messages": [USER]}, headers=KEY)
    answer = await client.answer()
    assert answer.status == 502 and b"so far" not in answer.body, "there is no other instance to try"
    assert (await fleet.kept(await fleet.live()))["output_tokens"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_of_a_client_gives_no_request_back(fleet: Fleet, stream: bool) -> None:
    """vLLM reports the stop string that ended an answer in the field by which decoders of vLLM-Ascend give one back."""
    choice = {"index": 0, "text": "x", "finish_reason": "stop", "stop_reason": "recomputed"}
    usage = {"prompt_tokens": 3, "completion_tokens": 70}

    async def script(talk: Talk) -> None:
        if not stream:
            return await talk.answer({"choices": [choice], "usage": usage})
        await talk.begin_stream()
        await talk.chunk(sse({"choices": [choice]}))
        await talk.chunk(sse({"choices": [], "usage": usage}))
        return await talk.end_stream()

    await fleet(script, output_tokens_per_minute=10**6)
    client = await fleet.router.connect()
    body = {"model": "default", "prompt": "hi", "stream": stream, "stop": ["recomputed"]}
    client.request("/v1/completions", body, headers=KEY)
    answer = await client.answer()
    assert answer.status == 200 and answer.headers["x-dualmap-attempts"] == "1" and b"recomputed" in answer.body
    assert (await fleet.kept(await fleet.live()))["output_tokens"] == 70


async def test_bodies_that_a_tenant_never_ends_leave_room_for_those_of_others(fleet: Fleet) -> None:
    async def script(talk: Talk) -> None:
        await talk.answer({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    await fleet(script, requests_in_flight=1)
    router = await fleet.start_router(
        fleet.runtime.intake, tenants=fleet.runtime.tenants, max_body_bytes=4096, max_buffered_body_bytes=20_000
    )
    head = f"POST {kit.CHAT} HTTP/1.1\r\nhost: h\r\n{KEY}content-length: 2000\r\n\r\n"
    clients = []
    for _ in range(12):
        clients.append(await router.connect())
        clients[-1].send(head.encode() + b" " * 1999)
    await kit.eventually(lambda: router.plane.bodies.held_bytes >= 9000)
    other = await router.connect()
    other.request(kit.CHAT, {**CHAT, "stream": False}, headers="x-api-key: others-secret\r\n")
    assert (await other.answer()).status == 200
    for client in clients:
        client.close()
    await kit.eventually(lambda: router.plane.bodies.held_bytes == 0)
