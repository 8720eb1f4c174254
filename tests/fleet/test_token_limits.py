"""Limits on tokens of a real fleet, in front of an instance that reads requests as vLLM's server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import pytest
import redis
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from dualmap.scheduling.tenants.budgets import KINDS
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.codec import budgets_from
from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until
from tests.support.served_instance import ReadRequest, ServedInstance, served_instance

QUOTA, CONTEXT = 12_000, 500
COMPUTES_S = 0.3
TENANTS = [
    {
        "name": "asked",
        "keys": [{"name": "k", "key": "asked-key"}],
        "limits": {"tokens_per_day": QUOTA},
        "draws": "asked",
    },
    {"name": "expected", "keys": [{"name": "k", "key": "expected-key"}], "limits": {"tokens_per_day": 10_000_000}},
    {"name": "small", "keys": [{"name": "k", "key": "small-key"}], "limits": {"tokens_per_minute": 100}},
    {"name": "once", "keys": [{"name": "k", "key": "once-key"}], "limits": {"requests_per_day": 1}},
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "max_tokens": 300}),
    "answers": ("/v1/chat/completions", {**CHAT, "max_tokens": 60, "n": 5}),
    "no limit": ("/v1/chat/completions", CHAT),
    "another API's limit": ("/v1/chat/completions", {**CHAT, "max_output_tokens": 1}),
    "prompts": ("/v1/completions", {"model": "m", "prompt": [[1, 2, 3]] * 8, "max_tokens": 40}),
    "completion": ("/v1/completions", {"model": "m", "prompt": "hello " * 30, "max_tokens": 200}),
    "message": ("/v1/messages", {**CHAT, "max_tokens": 250}),
    "response": ("/v1/responses", {"model": "m", "input": "hello", "max_output_tokens": 250}),
    "invocation": ("/invocations", {**CHAT, "max_tokens": 100, "n": 2}),
    "batch": ("/v1/chat/completions/batch", {"model": "m", "messages": [CHAT["messages"]] * 4, "max_tokens": 50}),
    "generate": ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 200}}),
    "scoring": ("/generative_scoring", {"model": "m", "query": "which? " * 20, "items": ["a", "b", "c"]}),
}


def usage_of(read: ReadRequest) -> dict[str, int]:
    """The tokens that an engine computes for a request: all that it asks for."""
    fields = read.fields
    if read.path == "/generative_scoring":
        return {"prompt_tokens": 3 * len(fields["query"]) // 2, "completion_tokens": 3}
    limit = (fields.get("sampling_params") or fields).get("max_tokens")
    if read.path == "/v1/responses":
        limit = fields.get("max_output_tokens")
    prompts = fields["prompt"] if isinstance(fields.get("prompt"), list) else [fields.get("prompt")]
    if read.path == "/v1/chat/completions/batch":
        prompts = fields["messages"]
    answers = len(prompts) * (fields.get("n") or 1)
    prompt_tokens = sum(len(json.dumps(each)) // 4 for each in prompts) + 1
    return {"prompt_tokens": prompt_tokens, "completion_tokens": answers * (limit or CONTEXT - prompt_tokens)}


def answer(read: ReadRequest) -> Response:
    usage = usage_of(read)
    if read.path in ("/v1/messages", "/v1/responses"):
        usage = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    ended = {"stop_reason": "max_tokens"} if read.path == "/v1/messages" else {"status": "completed"}
    body = {"id": "x", "model": "m", "choices": [], "content": [], "output": [], **ended, "usage": usage}

    async def computed() -> AsyncIterator[bytes]:
        await asyncio.sleep(COMPUTES_S)
        yield json.dumps(body).encode()

    return StreamingResponse(computed(), media_type="application/json")


def lists_its_context(app: FastAPI) -> None:
    @app.get("/v1/models")
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": CONTEXT}]}


@pytest.fixture(scope="module")
def served() -> Iterator[ServedInstance]:
    with served_instance("m", answer=answer, route_more=lists_its_context) as instance:
        yield instance


@pytest.fixture(scope="module")
def fleet(served: ServedInstance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    pools = [{"name": "default", "model": "m", "instances": [{"id": "a", "url": served.url}]}]
    options = ("--replicas", "2", "--workers", "1", "--pools", json.dumps(pools), "--tenants", json.dumps(TENANTS))
    with running_fleet(tmp_path_factory.mktemp("tokens"), (*QUICK, *options)) as running:
        yield running


async def send(fleet: Fleet, shape: str, key: str) -> httpx.Response:
    path, body = SHAPES[shape]
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{fleet.endpoint}{path}", json=body, headers={"authorization": f"Bearer {key}"})


async def together(fleet: Fleet, shapes: list[str], key: str) -> list[httpx.Response]:
    return await asyncio.gather(*[send(fleet, shape, key) for shape in shapes])


def tokens_in(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    return sum(usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"))


def used(fleet: Fleet, tenant: str) -> int:
    """The tokens that are used of the quota of a tenant."""
    with redis.Redis.from_url(fleet.store_url) as store:
        text = store.hget(PoolKeys("dualmap", "default").books, tenant)
    return round(sum(budgets_from(text)[kind][0] for kind in [KINDS.index("tokens/day")])) if text else 0


def test_a_burst_that_draws_what_it_asks_for_never_exceeds_a_quota(fleet: Fleet) -> None:
    answers = asyncio.run(together(fleet, [*SHAPES] * 4, "asked-key"))
    admitted = [each for each in answers if each.status_code == 200]
    assert {each.status_code for each in answers} == {200, 429}
    assert sum(map(tokens_in, admitted)) <= QUOTA

    # what was not used is there for later requests, until nothing fits any more
    until(lambda: used(fleet, "asked") == sum(map(tokens_in, admitted)), "the books have what was computed")
    while any(each.status_code == 200 for each in answers):
        answers = asyncio.run(together(fleet, [*SHAPES], "asked-key"))
        admitted += [each for each in answers if each.status_code == 200]
    assert QUOTA - 1000 < sum(map(tokens_in, admitted)) <= QUOTA


@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_is_charged_what_its_instance_counted(fleet: Fleet, shape: str) -> None:
    fleet.until_idle()
    before = used(fleet, "expected")
    (answer,) = asyncio.run(together(fleet, [shape], "expected-key"))
    assert answer.status_code == 200, answer.text

    until(lambda: used(fleet, "expected") - before == tokens_in(answer), f"what {shape} used is in the books")


def test_a_path_that_is_passed_on_is_refused_by_a_limit_on_tokens_as_any_other(fleet: Fleet) -> None:
    refused = asyncio.run(together(fleet, ["batch", "answers"], "small-key"))

    for each in refused:
        assert each.status_code == 429, each.text
        assert each.headers["x-ratelimit-limit-tokens"] == "100"
        assert each.headers["x-ratelimit-remaining-tokens"] == "100"
    (free,) = asyncio.run(together_free(fleet))
    assert free.status_code == 200, "what computes nothing needs no tokens"


async def together_free(fleet: Fleet) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "m", "prompt": "hello " * 500}
        return [await client.post(f"{fleet.endpoint}/tokenize", json=body, headers={"x-api-key": "small-key"})]


def test_a_spent_quota_is_told_in_the_fields_of_the_api(fleet: Fleet) -> None:
    asyncio.run(together(fleet, ["chat"], "once-key"))
    chat, message, invocation = asyncio.run(together(fleet, ["chat", "message", "invocation"], "once-key"))

    for each in (chat, invocation):
        assert (each.status_code, each.json()["error"]["code"]) == (429, "insufficient_quota")
        assert (each.headers["x-ratelimit-limit-requests"], each.headers["x-ratelimit-remaining-requests"]) == (
            "1",
            "0",
        )
        assert "x-ratelimit-reset-requests" in each.headers and "retry-after" not in each.headers
        assert each.headers["x-should-retry"] == "false"
    assert message.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert message.headers["anthropic-ratelimit-requests-reset"].endswith("T00:00:00Z")
