"""The emulated server as clients see it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import orjson
import pytest

from dualmap.simulation.emulator.generation_request import DEADLY_TEXT
from dualmap.simulation.emulator.instance import PORT_CLOSES_AFTER_S, EmulatedInstance

MODEL = "qwen2.5-7b"
Eventually = Callable[[Callable[[], Any]], Awaitable[None]]


def client_of(emulator: EmulatedInstance) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{emulator.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(content: str = "hello there", **changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **changes}


def events_of(text: str) -> list[Any]:
    payloads = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [payload if payload == "[DONE]" else orjson.loads(payload) for payload in payloads]


# inference ----------------------------------------------------------------------------------------------------
async def test_the_openai_client_chats(emulator: EmulatedInstance) -> None:
    async with client_of(emulator) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello there"}], max_tokens=7
        )
    assert answer.choices[0].finish_reason == "length"
    assert len((answer.choices[0].message.content or "").encode()) == 7 * 4
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 7)


async def test_the_openai_client_streams_text_token_by_token_with_usage_at_the_end(emulator: EmulatedInstance) -> None:
    async with client_of(emulator) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello there"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Id": "my-id"},
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-my-id"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[0].choices[0].delta.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) == 12 * 4
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_the_same_request_gets_the_same_text_streamed_or_not(emulator: EmulatedInstance) -> None:
    async with client_of(emulator) as client:
        whole = await client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=30)
        stream = await client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=30, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert streamed == whole.choices[0].text
    assert len(streamed) == 120


DEEP = "[" * 300 + "]" * 300
ODD = "\\ud800"
TOOL = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"deep": {DEEP}}}}}}}'


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", f'"cache_salt": "{ODD}"'),
        ("/v1/chat/completions", f'"model": "{ODD}"'),
        ("/v1/chat/completions", f'"request_id": "{ODD}"'),
        ("/v1/chat/completions", f'"tools": [{TOOL}]'),
        ("/v1/chat/completions", f'"tools": [{TOOL}], "tool_choice": "required"'),
        ("/v1/chat/completions", f'"messages": [{{"role": "{ODD}", "content": "hi"}}]'),
        (
            "/v1/chat/completions",
            f'"messages": [{{"role": "user", "content": [{{"type": "{ODD}", "text": {DEEP * 9}}}]}}]',
        ),
        ("/v1/completions", f'"cache_salt": "{ODD}", "stream": true'),
        ("/v1/messages", f'"cache_salt": "{ODD}"'),
        ("/v1/messages", f'"tools": [{{"name": "f", "input_schema": {{"deep": {DEEP}}}}}]'),
        ("/v1/responses", f'"metadata": {{"a": "{ODD}"}}'),
        ("/v1/responses", f'"metadata": {{"a": {DEEP}}}, "stream": true'),
        ("/v1/embeddings", f'"request_id": "{ODD}"'),
        ("/tokenize", f'"messages": [{{"role": "{ODD}", "content": "hi"}}]'),
    ],
)
async def test_what_no_answer_can_hold_is_refused_and_the_connection_goes_on(
    emulator: EmulatedInstance, path: str, fields: str
) -> None:
    prompt = {"/v1/completions": '"prompt": "hi"', "/v1/responses": '"input": "hi"', "/v1/embeddings": '"input": "hi"'}
    usual = prompt.get(path, '"messages": [{"role": "user", "content": "hi"}]')
    body = f'{{"model": "{MODEL}", "max_tokens": 1, "max_output_tokens": 1, {usual}, {fields}}}'
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60, verify=False, limits=limits) as client:
        refused = await client.post(path, content=body)
        assert (refused.status_code, "error" in refused.json()) == (400, True)
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_a_lone_surrogate_in_a_prompt_is_text(http: httpx.AsyncClient) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "\ud800"}}]
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": None, "tool_calls": calls}]

    answer = await http.post("/v1/chat/completions", content=json.dumps({**chat(), "messages": messages}))

    assert answer.status_code == 200


async def test_text_and_its_token_ids_are_the_same_prompt(http: httpx.AsyncClient) -> None:
    # given a prompt of 300 tokens, sent as text
    text = "one two thr fou fiv " * 60
    await http.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 1})
    # when it is tokenized and sent again as ids
    ids = (await http.post("/tokenize", json={"model": MODEL, "prompt": text})).json()["tokens"]
    answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": ids, "max_tokens": 1})
    # then its full blocks are found in the cache
    assert answer.json()["usage"] == {
        "prompt_tokens": 300,
        "total_tokens": 301,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 256},
    }


async def test_a_conversation_finds_its_former_turns_cached_but_another_salt_does_not(http: httpx.AsyncClient) -> None:
    turns = [{"role": "user", "content": "a" * 4000}]
    await http.post("/v1/chat/completions", json=chat(messages=turns))
    turns += [{"role": "assistant", "content": "b" * 40}, {"role": "user", "content": "c" * 40}]
    again = await http.post("/v1/chat/completions", json=chat(messages=turns))
    salted = await http.post("/v1/chat/completions", json=chat(messages=turns, cache_salt="other"))
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 7 * 128
    assert salted.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_without_a_limit_the_length_is_drawn_from_the_request_and_ends_with_stop(http: httpx.AsyncClient) -> None:
    lengths = set()
    for word in ("one", "two", "three", "one"):
        body = {"model": MODEL, "messages": [{"role": "user", "content": word}], "min_tokens": 3}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        lengths.add(answer["usage"]["completion_tokens"])
    assert len(lengths) == 3
    assert min(lengths) >= 3


async def test_the_head_of_a_stream_comes_at_once_and_the_role_with_the_first_token(emulator: EmulatedInstance) -> None:
    # given an engine that makes no progress
    emulator.generator.pause()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(emulator.url.rpartition(":")[2]))
    body = orjson.dumps(chat(stream=True))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    # then the head is there, and nothing else
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 200 OK")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    # when it goes on, the role comes first
    emulator.generator.resume()
    first = await asyncio.wait_for(reader.readuntil(b"\n\n"), 60)
    assert b'"delta":{"role":"assistant","content":""}' in first
    writer.close()


# errors -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404, "not exist"),
        ("/v1/chat/completions", {"model": MODEL}, 400, "messages"),
        ("/v1/chat/completions", chat(messages=[{"content": "x"}]), 400, "role"),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": 5}]), 400, "content"),
        ("/v1/chat/completions", chat(max_tokens=0), 400, "max_tokens"),
        ("/v1/chat/completions", chat(max_tokens="many"), 400, "max_tokens"),
        ("/v1/chat/completions", chat(max_tokens=131_073), 400, "max_tokens=131073 cannot be greater than"),
        ("/v1/chat/completions", chat(n=0), 400, "n must be at least 1"),
        ("/v1/chat/completions", chat(n=2, temperature=0), 400, "greedy"),
        ("/v1/chat/completions", chat(temperature=-1), 400, "temperature must be non-negative"),
        ("/v1/chat/completions", chat(stop=""), 400, "stop cannot contain an empty string"),
        ("/v1/chat/completions", chat(stop=5), 400, "body.stop"),
        ("/v1/chat/completions", chat(stream_options={"include_usage": True}), 400, "`stream=True`"),
        ("/v1/chat/completions", chat("x" * 4 * 131_072), 400, "maximum context length is 131072"),
        ("/v1/completions", {"model": MODEL, "prompt": []}, 400, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [""]}, 400, "cannot be empty"),
        ("/v1/completions", {"model": MODEL, "prompt": [[]]}, 400, "cannot be empty"),
        ("/v1/completions", {"model": MODEL, "prompt": ["a", [1]]}, 400, "body.prompt.1"),
        ("/v1/completions", {"model": MODEL, "prompt": [1, "2"]}, 400, "valid integer"),
        ("/v1/completions", {"model": MODEL, "prompt": [-1]}, 400, "negative"),
        ("/detokenize", {"tokens": "1"}, 400, "valid list"),
        ("/detokenize", {}, 400, "Field required"),
    ],
)
async def test_bad_requests_get_vllm_style_errors(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["code"] == status


async def test_an_answer_ends_where_the_context_does_and_a_prompt_that_leaves_no_room_is_refused(
    start_emulator: Any,
) -> None:
    emulator = await start_emulator(kv_capacity_tokens=1280)
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:

        async def complete(prompt_tokens: int) -> httpx.Response:
            body = {"model": MODEL, "prompt": "x" * 4 * prompt_tokens, "max_tokens": 100}
            return await client.post("/v1/completions", json=body)

        fits = (await complete(1270)).json()
        assert (fits["usage"]["completion_tokens"], fits["choices"][0]["finish_reason"]) == (10, "length")
        full, beyond = await complete(1280), await complete(1281)
        assert full.json()["error"]["message"].startswith("max_tokens must be at least 1, got 0")
        assert "maximum context length is 1280" in beyond.json()["error"]["message"]


async def test_what_is_no_json_object_is_refused(http: httpx.AsyncClient) -> None:
    for body in (b"{", b"[]", b"\xff"):
        answer = await http.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "Bad Request"


async def test_an_unknown_path_or_method_has_no_more_than_a_detail(http: httpx.AsyncClient) -> None:
    for answer, status, detail in (
        (await http.post("/v1/nothing", json={}), 404, "Not Found"),
        (await http.get("/v1/chat/completions"), 405, "Method Not Allowed"),
    ):
        assert answer.status_code == status
        assert answer.json() == {"detail": detail}


# about the server ---------------------------------------------------------------------------------------------
async def test_the_server_tells_about_itself(http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 131_072)]
    assert (await http.get("/health")).status_code == 200
    assert "version" in (await http.get("/version")).json()
    assert (await http.get("/load")).json() == {"server_load": 0}
    assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200


async def test_tokens_become_text_again(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": "grüße, welt"})).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4
    assert (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "grüße, welt"}
    strings = (await http.post("/tokenize", json={"prompt": "grüße, welt", "return_token_strs": True})).json()
    assert "".join(strings["token_strs"]) == "grüße, welt"
    messages = [{"role": "user", "content": "hello there"}]
    assert (await http.post("/tokenize", json={"messages": messages})).json()["count"] == 16


async def test_metrics_have_vllm_s_names_and_count_what_happened(http: httpx.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=chat("x" * 2000, max_tokens=5))
    await http.post("/v1/chat/completions", json=chat("x" * 2000, max_tokens=5))
    page = (await http.get("/metrics")).text
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    for line in (
        f"vllm:num_requests_running{labels} 0.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:kv_cache_usage_perc{labels} 0.0",
        f"vllm:prefix_cache_queries_total{labels} 1026.0",
        f"vllm:prefix_cache_hits_total{labels} 512.0",
        f"vllm:num_preemptions_total{labels} 0.0",
        f"vllm:generation_tokens_total{labels} 10.0",
        f"vllm:time_to_first_token_seconds_count{labels} 2.0",
        f"vllm:inter_token_latency_seconds_count{labels} 8.0",
        f"vllm:request_queue_time_seconds_count{labels} 2.0",
        f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}} 2.0',
    ):
        assert line in page
    assert 'vllm:cache_config_info{block_size="128"' in page


async def test_requests_wait_in_the_order_of_their_priorities(start_emulator: Any, eventually: Eventually) -> None:
    emulator = await start_emulator(preset="qwen2.5-7b-910b4:by_priority", max_num_seqs=1, max_num_batched_tokens=512)
    emulator.generator.pause()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat(priority=7)),
        ("/v1/completions", {"model": MODEL, "prompt": "hello", "priority": 5}),
        ("/v1/responses", {"model": MODEL, "input": "hello", "priority": -3}),
        ("/v1/chat/completions", chat()),
    ]
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        tasks = []
        for path, body in asked:
            tasks.append(asyncio.create_task(client.post(path, json=body)))
            await eventually(lambda: emulator.generator.active == len(tasks))
        waiting = emulator.generator.engine._scheduler.waiting.values()
        assert [each.request.priority for each in waiting] == [-3, 0, 5, 7]
        emulator.generator.resume()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 4


# clients that leave, faults -----------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(start_emulator: Any, stream: bool, eventually: Eventually) -> None:
    emulator = await start_emulator(time_scale=1.0, max_num_seqs=1, max_num_batched_tokens=512)
    url = f"{emulator.url}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=60) as client:
        # given one running and one waiting request
        tasks = [
            asyncio.create_task(client.post(url, json=chat(f"{number}" * 40, max_tokens=5000, stream=stream)))
            for number in range(2)
        ]
        await eventually(lambda: emulator.generator.engine.statistics().running == 1)
        await eventually(lambda: emulator.generator.engine.statistics().waiting == 1)
        # when both clients leave
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # then nothing is left of them
    await eventually(lambda: emulator.generator.active == 0)
    statistics = emulator.generator.engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.used_blocks) == (0, 0, 0)


async def test_a_full_queue_is_refused_with_503(start_emulator: Any, eventually: Eventually) -> None:
    emulator = await start_emulator(max_num_seqs=1, max_num_batched_tokens=512, max_queued_requests=1)
    emulator.generator.pause()
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
        await eventually(lambda: emulator.generator.active == 1)
        refused = await client.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 503
        assert "retry-after" not in refused.headers
        emulator.generator.resume()
        assert (await waiting).status_code == 200


async def test_a_paused_engine_stays_healthy_and_answers_nothing_until_it_goes_on(http: httpx.AsyncClient) -> None:
    assert (await http.post("/emulator/pause")).json() == {"paused": True}
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
    assert (await http.get("/health")).status_code == 200
    done, _pending = await asyncio.wait([asking], timeout=0.2)
    assert not done
    assert (await http.post("/emulator/resume")).json() == {"paused": False}
    assert (await asking).status_code == 200


async def test_the_next_requests_fail_as_ordered(http: httpx.AsyncClient) -> None:
    await http.post("/emulator/fail", json={"count": 2, "status": 429})
    statuses = [(await http.post("/v1/chat/completions", json=chat())).status_code for _ in range(3)]
    assert statuses == [429, 429, 200]


async def test_the_next_answer_is_given_back_as_ordered(http: httpx.AsyncClient) -> None:
    await http.post("/emulator/fail", json={"answer": "recomputed", "after_tokens": 2})
    given_back, whole = [
        (await http.post("/v1/chat/completions", json=chat(stream=stream))) for stream in (True, False)
    ]
    last = events_of(given_back.text)[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "recomputed")
    assert whole.json()["usage"]["completion_tokens"] == 4
    refused = await http.post("/emulator/fail", json={"answer": "empty", "after_tokens": 2})
    assert refused.status_code == 400


async def test_a_dying_engine_ends_streams_with_an_error_event_and_closes_its_port(
    emulator: EmulatedInstance, eventually: Eventually
) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        # given a stream and a plain request under way
        asking = [
            asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=9000, stream=stream)))
            for stream in (True, False)
        ]
        await eventually(lambda: emulator.generator.active == 2)
        # when the engine dies for a moment
        await client.post("/emulator/die", json={"revive_after_s": 0.1})
        streamed, plain = await asyncio.gather(*asking)
        # then the stream ends under its 200 with an error and [DONE], and the other request with 500
        assert streamed.status_code == 200
        error, done = events_of(streamed.text)[-2:]
        assert error["error"]["code"] == 500
        assert done == "[DONE]"
        assert plain.status_code == 500
        # new requests fail until the port is gone
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 500

        async def refused() -> bool:
            try:
                await client.get("/health")
            except httpx.TransportError:
                return True
            return False

        await eventually(refused)

        async def back() -> bool:
            return not await refused()

        # and it comes back on the same port
        await eventually(back)
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_a_paused_engine_that_dies_comes_back_at_work(emulator: EmulatedInstance, eventually: Eventually) -> None:
    emulator.generator.pause()
    emulator.die(abruptly=False, revive_after_s=0.0)
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:

        async def answered() -> bool:
            try:
                return (await client.post("/v1/chat/completions", json=chat())).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answered)


async def test_a_server_that_dies_twice_comes_back_as_the_second_death_says(
    emulator: EmulatedInstance, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a server that notes when its engine starts again
    loop, restarted_s, restart = asyncio.get_running_loop(), list[float](), emulator.generator.restart

    def noted_restart() -> None:
        restarted_s.append(loop.time())
        restart()

    monkeypatch.setattr(emulator.generator, "restart", noted_restart)
    # when it dies again before it is back
    began_s = loop.time()
    emulator.die(abruptly=False, revive_after_s=0.0)
    emulator.die(abruptly=False, revive_after_s=0.2)
    # then the first death's return, from which a live engine would lose its requests, does not happen
    await eventually(lambda: bool(restarted_s))
    assert restarted_s[0] - began_s >= 0.2 + PORT_CLOSES_AFTER_S

    async def back() -> bool:
        async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
            try:
                return (await client.get("/health")).status_code == 200
            except httpx.TransportError:
                return False

    await eventually(back)


async def test_a_server_that_came_back_has_a_later_start_time_and_counts_from_zero(
    emulator: EmulatedInstance, eventually: Eventually
) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:

        async def metric(name: str) -> float | None:
            try:
                page = (await client.get("/metrics")).text
            except httpx.TransportError:
                return None
            return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

        # given a server that has cached a prompt
        body = {"model": MODEL, "prompt": "x" * 2000, "max_tokens": 1}
        await client.post("/v1/completions", json=body)
        first_start = await metric("process_start_time_seconds")
        assert first_start == pytest.approx(time.time(), abs=60)
        assert await metric("vllm:prefix_cache_queries_total") == 500
        # when its process is killed and started again
        await client.post("/emulator/die", json={"abruptly": True, "revive_after_s": 0})

        async def started_again() -> bool:
            start = await metric("process_start_time_seconds")
            return start is not None and start > first_start

        await eventually(started_again)
        # then it knows nothing of before
        assert await metric("vllm:prefix_cache_queries_total") == 0
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_marked_prompt_kills_the_engine_when_it_is_started_on(
    start_emulator: Any, eventually: Eventually, stream: bool
) -> None:
    # given an engine that works on one request at a time, with a harmless one under way
    emulator = await start_emulator(max_num_seqs=1, max_num_batched_tokens=512)
    emulator.generator.pause()
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        harmless = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
        await eventually(lambda: emulator.generator.active == 1)
        # when a marked prompt waits behind it
        marked = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat(f"so {DEADLY_TEXT.decode()}", stream=stream))
        )
        await eventually(lambda: emulator.generator.active == 2)
        emulator.generator.resume()
        # then the first is answered, and the marked one ends as with any dying engine
        assert (await harmless).status_code == 200
        answer = await marked
        if stream:
            assert answer.status_code == 200
            assert events_of(answer.text)[-2]["error"]["code"] == 500
        else:
            assert answer.status_code == 500

        async def port_closed() -> bool:
            try:
                await client.get("/health")
            except httpx.TransportError:
                return True
            return False

        await eventually(port_closed)


async def test_a_killed_server_cuts_its_connections(emulator: EmulatedInstance, eventually: Eventually) -> None:
    async with httpx.AsyncClient(base_url=emulator.url, timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat(max_tokens=9000)))
        await eventually(lambda: emulator.generator.active == 1)
        await client.post("/emulator/die", json={"abruptly": True})
        with pytest.raises(httpx.TransportError):
            await asking
        with pytest.raises(httpx.TransportError):
            await client.get("/health")


async def test_ranks_are_engines_of_their_own_behind_one_port(start_emulator: Any) -> None:
    server = await start_emulator(data_parallel_size=2)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def ask(rank: int | None) -> httpx.Response:
            headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
            body = {"model": MODEL, "prompt": "x" * 4096, "max_tokens": 1}
            return await client.post("/v1/completions", json=body, headers=headers)

        found = [(await ask(rank)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for rank in (0, 1, 1, 0)]
        refused, page = await ask(2), (await client.get("/metrics")).text

    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 0
    assert refused.status_code == 400 and "out of range" in refused.json()["error"]["message"]
    samples = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    assert [line.rpartition(" ")[2] for line in samples] == ["2048.0", "2048.0"]
    assert page.count("# HELP vllm:prompt_tokens_total") == 1


async def test_a_response_goes_to_the_rank_that_the_server_chooses(start_emulator: Any) -> None:
    server = await start_emulator(data_parallel_size=2)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for named in ("1", "7"):
            body = {"model": MODEL, "input": "x" * 4096, "max_output_tokens": 1}
            answer = await client.post("/v1/responses", json=body, headers={"x-data-parallel-rank": named})
            assert answer.status_code == 200
        page = (await client.get("/metrics")).text
        ignored = await client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-data-parallel-rank": "abc"}
        )

    samples = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    assert [float(line.rpartition(" ")[2]) > 0 for line in samples] == [True, False]
    assert ignored.status_code == 200


async def test_metrics_show_the_progress_of_an_answer_that_does_not_stream(http: httpx.AsyncClient) -> None:
    async def generated() -> float:
        page = (await http.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    answer = asyncio.create_task(http.post("/v1/chat/completions", json=chat(max_tokens=20_000, ignore_eos=True)))
    async with asyncio.timeout(30):
        while (first := await generated()) < 2:
            pass
        while await generated() < first + 2:
            pass
    assert not answer.done()
    answer.cancel()
