"""The control of an engine: pause, sleep, and the end of single requests."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httpx
import pytest

from tests.conformance.server import Server

CHAT, COMPLETION, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSE = "/v1/responses"
ABORT = "/inference/v1/abort_requests"


@pytest.fixture
async def controlled(server: Server) -> Any:
    """A server that can be paused; it is resumed afterwards."""
    if (await server.http.get("/is_paused")).status_code == 404:
        pytest.skip("the server has no /pause: VLLM_SERVER_DEV_MODE=1")
    yield server
    await server.http.post("/resume")


def asked(server: Server, path: str, **more: Any) -> dict[str, Any]:
    prompts = {COMPLETION: {"prompt": "once"}, RESPONSE: {"input": "once"}}
    prompt: dict[str, Any] = prompts.get(path, {"messages": [{"role": "user", "content": "a"}]})
    limit = "max_output_tokens" if path == RESPONSE else "max_tokens"
    ends = {} if path == MESSAGE else {"ignore_eos": True}
    return {"model": server.model, limit: 1500, "temperature": 0, **prompt, **ends, **more}


async def generated(server: Server) -> float:
    """Tokens that the server has generated in all."""
    page = (await server.http.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def aborted(server: Server, path: str, request_id: str, engine_id: str, **more: Any) -> httpx.Response:
    """The answer to a request that is aborted by the engine's own id, once it has tokens: before, a stream of vLLM ends
    without any reason, or in a message with ``end_turn``."""
    own = {"request_id": engine_id.removesuffix("_0")} if path == RESPONSE else {}
    body, before = asked(server, path, **own, **more), await generated(server)
    asking = asyncio.create_task(server.http.post(path, json=body, headers={"x-request-id": request_id}))
    async with asyncio.timeout(60):
        while await generated(server) < before + 3:  # noqa: ASYNC110 - what the server says
            await asyncio.sleep(0.02)
        while not asking.done():
            answer = await server.http.post(ABORT, json={"request_ids": [engine_id]})
            if answer.status_code == 403:
                await asking
                pytest.skip("the server has no endpoint to abort: --enable-scale-out")
            await asyncio.sleep(0.05)
    return await asking


ENGINE_IDS = {CHAT: "chatcmpl-{}", COMPLETION: "cmpl-{}-0", MESSAGE: "chatcmpl-{}", RESPONSE: "resp_{}_0"}


@pytest.mark.parametrize("path", ENGINE_IDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_aborted_ends_as_its_api_says(server: Server, path: str, stream: bool) -> None:
    name = uuid.uuid4().hex
    answer = await aborted(server, path, name, ENGINE_IDS[path].format(name), stream=stream)

    assert answer.status_code == 200
    if path == RESPONSE:
        assert '"status":"completed"' in answer.text.replace(" ", ""), "as one that is over"
        assert '"status":"cancelled"' not in answer.text.replace(" ", "")
    elif path == MESSAGE:
        reason = '"stop_reason":'
        if stream:
            last = answer.text.replace(" ", "").rpartition('"message_delta"')[2]
            assert f"{reason}null" in last or reason not in last
        else:
            assert "stop_reason" not in answer.json()
    else:
        assert '"finish_reason":"abort"' in answer.text.replace(" ", "")


async def test_unknown_ids_are_nobodys(server: Server) -> None:
    answer = await server.http.post(ABORT, json={"request_ids": ["nobody"]})
    assert (answer.status_code, answer.content) in ((200, b""), (403, answer.content))


@pytest.mark.parametrize(
    ("order", "keeps"),
    [
        ("/pause", False),
        ("/pause?clear_cache=false", True),
        ("/pause?mode=keep", False),
        ("/pause?mode=keep&clear_cache=false", True),
        ("/sleep?level=0", True),
    ],
)
async def test_a_paused_engine_takes_requests_and_its_cache_is_emptied_unless_it_is_to_stay(
    controlled: Server, order: str, keeps: bool
) -> None:
    prompt = f"{uuid.uuid4()} the same words again and again, " * 12
    await controlled.post(COMPLETION, prompt=prompt, max_tokens=1)

    assert (await controlled.http.post(order)).status_code == 200
    told = [(await controlled.http.get(path)).json() for path in ("/is_paused", "/is_sleeping")]
    waiting = asyncio.create_task(controlled.post(COMPLETION, prompt=prompt, max_tokens=1))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    resumed = (await controlled.http.post("/resume")).json()

    assert told == [{"is_paused": True}, {"is_sleeping": True}]
    assert not done, "it waits in the queue"
    assert resumed == {"status": "resumed"}
    cached = (await waiting)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert bool(cached) is keeps
    assert (await controlled.http.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_a_pause_aborts_what_runs_unless_it_is_kept(controlled: Server) -> None:
    for order, reason in (("/pause", "abort"), ("/pause?mode=keep", "length")):
        body = asked(controlled, CHAT, stream=True)
        async with controlled.http.stream("POST", CHAT, json=body) as answer:
            chunks = answer.aiter_text()
            await anext(chunks)
            await controlled.http.post(order)
            await controlled.http.post("/resume")
            text = "".join([chunk async for chunk in chunks])
        assert f'"finish_reason":"{reason}"' in text.replace(" ", "")


async def test_the_cached_tokens_of_a_list_of_prompts_are_those_of_one(server: Server) -> None:
    mark = uuid.uuid4()
    prompts = [f"{mark} {number} the same words again and again, " * 12 for number in range(2)]
    whole = (await server.post(COMPLETION, prompt=prompts, max_tokens=1))["usage"]
    each = [(await server.post(COMPLETION, prompt=prompt, max_tokens=1))["usage"] for prompt in prompts]
    again = (await server.post(COMPLETION, prompt=prompts, max_tokens=1))["usage"]

    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in each]
    assert whole["prompt_tokens"] == again["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in each)
    assert again["prompt_tokens_details"]["cached_tokens"] == cached[-1] > 0
