"""Requests with long bodies: read like short ones, in steps, one at a time, and what that takes is counted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

from dualmap.router.errors import unknown_model
from dualmap.router.http.admission import LONG_BODY_BYTES
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.long_bodies import LongBodies, Turns
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import InferenceRequest, SentPrompt
from dualmap.router.prompts.prompt import sent_prompt
from tests.router.http import kit
from tests.router.http.kit import StartInstance, StartRouter, Talk

CHAT = "/v1/chat/completions"
LONG = "a wörd and \n a \U0001f600 " * 8000
MANY = [{str(n): 1 for n in range(2000)}]
PARTS = [{"type": "text", "text": LONG}, {"type": "text", "text": "short"}]


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content} for content in messages], **more}


def request_of(path: str, body: bytes) -> ClientRequest:
    return ClientRequest("POST", path, b"", [], http_10=False, keep_alive=True, body=body)


@pytest.fixture
def bodies() -> BodyBudget:
    return BodyBudget(1 << 20)


@pytest.fixture
def reader(bodies: BodyBudget) -> LongBodies:
    return LongBodies(bodies, max_json_values=2000, max_json_bytes=1 << 20, max_prompt_parts=50)


def read(reader: LongBodies, path: str, body: object) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(raw) > LONG_BODY_BYTES
    return reader.read(request_of(path, raw), "id")


def apart_from_source(prompt: SentPrompt | None) -> SentPrompt:
    """The prompt without the fields that its tokens are computed from, whose long texts have other names, and without
    what is kept of it."""
    assert prompt is not None
    return replace(prompt, source=None, late_source=None, hashed=None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(LONG, "short", LONG)),
        (CHAT, chat("short " * 20_000)),
        (CHAT, chat(PARTS, "short", tools=[{"a": 1}])),
        (CHAT, chat(*["short text"] * 40, *["x" * 60_000] * 2)),
        ("/v1/completions", {"prompt": LONG, "cache_salt": "s", "max_tokens": 7}),
        ("/v1/completions", {"prompt": [LONG, "short"]}),
        ("/v1/completions", {"prompt": list(range(9_000, 9_900)) * 20}),
        ("/v1/completions", {"prompt_embeds": "AAAA" * 20_000}),
        ("/v1/completions", {"prompt": "", "prompt_embeds": ["AAAA" * 20_000, "BBBB"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("ascii_only", [True, False])
async def test_a_prompt_is_the_same_however_long_its_body_is(
    reader: LongBodies, path: str, body: dict[str, Any], ascii_only: bool
) -> None:
    read_request = await read(reader, path, json.dumps(body, ensure_ascii=ascii_only).encode())
    assert apart_from_source(read_request.prompt) == apart_from_source(sent_prompt(path, body))


@pytest.mark.parametrize("behind", [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": 5}])
async def test_a_very_long_name_of_a_model_is_known_by_its_beginning(
    reader: LongBodies, behind: dict[str, Any]
) -> None:
    found = await read(reader, CHAT, {"model": "né" * 50_000, **behind})

    message = unknown_model(found.model).message
    assert message.startswith("the model 'nénéné")
    assert len(message) < 250


async def test_a_tokenizer_gets_the_whole_of_a_long_chat_whose_messages_are_plain(reader: LongBodies) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}], "tools": [{"function": {"name": LONG}}]}

    prompt = (await read(reader, CHAT, json.dumps(body).encode())).prompt

    source = prompt.source if prompt.late_source is None else prompt.late_source()
    assert source is not None and source.body() == body and source.prompt == prompt.prompt


async def test_an_image_tells_prompts_apart_by_what_it_shows_and_not_by_how_it_was_escaped(reader: LongBodies) -> None:
    def illustrated(data: str) -> bytes:
        return orjson.dumps(chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}]))

    one, other = illustrated("AAAA" * 20_000), illustrated("BBBB" * 20_000)
    escaped = one.replace(b"AAAA/", b"AAAA\\/").replace(b"data:image/", b"data:image\\/")
    prompts = [apart_from_source((await read(reader, CHAT, body)).prompt) for body in (one, other, escaped)]
    assert prompts[0] == prompts[2] != prompts[1]
    assert prompts[0].images == 1


@pytest.mark.parametrize(
    ("body", "why", "model"),
    [
        ({"tools": MANY, "model": "m", "text": LONG}, "over 2000 ", ""),
        ({"model": "m", "tools": MANY, "text": LONG}, "over 2000 ", "m"),
        (chat("x" * 80_000)["messages"], "no JSON object", ""),
        (b'{"a":"' + b"x" * 80_000, "not valid JSON", ""),
        (b"\x80" * 80_000, "not valid JSON", ""),
    ],
)
async def test_a_long_body_that_cannot_be_read_is_passed_on_as_it_came(
    reader: LongBodies, bodies: BodyBudget, body: Any, why: str, model: str
) -> None:
    found = await read(reader, CHAT, body)
    assert found.prompt is None and found.body_hash
    assert why in found.unread and found.model == model
    assert bodies.held_bytes == 0


@pytest.mark.parametrize("body", [chat(*["x" * 2000] * 60), {**chat(), "text": "x" * 80_000}])
async def test_a_long_body_with_too_many_parts_or_no_prompt_is_passed_on(reader: LongBodies, body: Any) -> None:
    found = await read(reader, CHAT, body)
    assert found.prompt is None and found.body_hash and found.model == "m"


async def test_bodies_are_read_one_at_a_time_and_what_it_takes_is_counted_until_it_is_gone(
    reader: LongBodies, bodies: BodyBudget
) -> None:
    body, most = chat("x" * 500_000), 0
    tasks = [asyncio.create_task(read(reader, CHAT, body)) for _ in range(4)]
    while not all(task.done() for task in tasks):
        most = max(most, bodies.held_bytes)
        await asyncio.sleep(0)
    assert 1_000_000 <= most < 2_000_000
    assert bodies.held_bytes == 0
    assert all(isinstance(task.result(), InferenceRequest) for task in tasks)


async def test_a_client_that_leaves_lets_the_next_one_be_read(reader: LongBodies, bodies: BodyBudget) -> None:
    for steps in range(1, 8):
        task = asyncio.create_task(read(reader, CHAT, chat(LONG)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert bodies.held_bytes == 0
    assert await asyncio.wait_for(read(reader, CHAT, chat(LONG)), 60)


async def test_a_long_body_reaches_the_instance_under_the_models_own_name_and_is_else_unchanged(
    start_instance: StartInstance, start_router: StartRouter
) -> None:
    async def answer(talk: Talk) -> None:
        await talk.answer()

    instance = await start_instance(answer)
    router = await start_router(kit.Intake([instance.url], model="real"))
    client = await router.connect()
    body = chat([{"type": "text", "text": LONG, "model": "m"}], metadata={"model": "m"})
    sent = json.dumps(body, ensure_ascii=False).encode()
    client.request(CHAT, sent)
    assert (await client.answer()).status == 200
    assert instance.talks[0].body == sent.replace(b'"model": "m"', b'"model": "real"', 1)


@pytest.mark.parametrize("fields", [{"n": " " * 70_000 + "50"}, {"sampling_params": {"n": "0" * 70_000 + "50"}}])
async def test_a_body_whose_number_of_answers_is_a_long_text_counts_as_unread(
    reader: LongBodies, fields: dict[str, Any]
) -> None:
    assert "'n' is a long text" in (await read(reader, CHAT, chat("hi", **fields))).unread
    assert (await read(reader, CHAT, chat("hi", user=" " * 70_000 + "50"))).unread == ""


async def test_a_body_waits_for_one_of_each_other_tenant_however_many_wait() -> None:
    turns, order = Turns(), list[str]()

    async def read_one(tenant: str, name: str) -> None:
        await turns.take(tenant)
        order.append(name)
        await asyncio.sleep(0)
        turns.give()

    await turns.take("first")
    async with asyncio.TaskGroup() as tasks:
        for name in (*(f"heavy-{number}" for number in range(20)), "light-0", "light-1", "other-0"):
            tasks.create_task(read_one(name.partition("-")[0], name))
        await asyncio.sleep(0)
        turns.give()
    assert order[:7] == ["heavy-0", "light-0", "other-0", "heavy-1", "light-1", "heavy-2", "heavy-3"]
    assert len(order) == 23


@pytest.mark.parametrize("has_come", [False, True])
async def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next_one(has_come: bool) -> None:
    turns = Turns()
    await turns.take("a")
    left, next_one = asyncio.create_task(turns.take("b")), asyncio.create_task(turns.take("b"))
    await asyncio.sleep(0)
    if has_come:
        turns.give()
    left.cancel()
    if not has_come:
        turns.give()
    await asyncio.wait_for(next_one, 5.0)
    turns.give()
    await asyncio.wait_for(turns.take("c"), 5.0)
