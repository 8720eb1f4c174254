"""A body whose beginning is known reads like any other: the same request, the same chain, the same refusals."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.api_bodies import listed_json
from dualmap.router.errors import RouterError
from dualmap.router.http.admission import LONG_BODY_BYTES, read_inference_request
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.long_bodies import LongBodies
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts import known_bodies
from dualmap.router.prompts.inference_request import InferenceRequest, SentPrompt
from dualmap.router.prompts.prompt import ReadPrompt, read_prompt
from dualmap.router.steps import in_steps
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import BlockRule, ContinuedText
from dualmap.scheduling.tenants.budgets import Limit, Measure
from dualmap.scheduling.tenants.tenant import Caller, Tenant

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
RULE = BlockRule(4, 16)
TENANT = Tenant("acme", limits=(Limit(Measure.TOKENS, 10, 60.0),), models=frozenset({"m"}))
STRETCH_BYTES = 64


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of a few hundred bytes have several stretches and points."""
    monkeypatch.setattr(listed_json, "STRETCH_BYTES", STRETCH_BYTES)
    monkeypatch.setattr(known_bodies, "GRID_BYTES", STRETCH_BYTES)


def reader(**limits: int) -> LongBodies:
    return LongBodies(BodyBudget(1 << 30), **limits)


def request_of(path: str, body: bytes, tenant: Tenant | None = TENANT) -> ClientRequest:
    request = ClientRequest("POST", path, b"", [], http_10=False, keep_alive=True, body=body)
    request.caller = None if tenant is None else Caller(tenant, "ci")
    return request


async def chain_of(sent: SentPrompt | None, model: str = "m") -> ReadPrompt | None:
    if sent is None:
        return None
    return await read_prompt(sent, model=model, lora=None, rule=RULE, learned=Learned())


Seen = tuple[dict[str, Any], ReadPrompt | None] | str


async def seen(read: Callable[[], Any]) -> Seen:
    """All of a request that was read, or the refusal."""
    try:
        request = read()
        request = request if isinstance(request, InferenceRequest) else await request
    except RouterError as error:
        return f"{type(error).__name__}: {error}"
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    sent = values.pop("prompt")
    if sent is not None:
        values |= {"salt": sent.salt, "teaches": sent.teaches, "limit": sent.output_limit, "size": sent.text_bytes}
    return values, await chain_of(sent)


def seen_by(known: LongBodies, path: str, body: bytes) -> Seen:
    return asyncio.run(seen(lambda: known.read(request_of(path, body), "id")))


def seen_at_once(path: str, body: bytes) -> Seen:
    return asyncio.run(seen(lambda: read_inference_request(request_of(path, body), "id")))


# conversations ---------------------------------------------------------------------------------------------------
TEXTS = st.sampled_from(
    ["", "short", 'he said "},{"', '"}],"model":"x"}', "},{", "日本語 — é", "a" * 70, "line\nend\t\\u0041"]
)
VALUES = st.sampled_from([None, 1, "x", [], {}, [{"a": 1}, {"b": "},{"}], {"messages": [{"role": "user"}]}])
PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
        st.just("plain"),
    ),
    max_size=3,
)
ODD_PARTS = st.sampled_from([[{"type": "image_url", "image_url": {"url": "u"}}], [{"type": "odd", "text": 1}]])
CALLS = st.builds(
    lambda text: [{"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}],
    TEXTS,
)
CHAT_ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system", "tool"]), TEXTS),
    st.builds(lambda parts: {"role": "user", "content": parts}, PARTS),
    st.builds(lambda calls, text: {"role": "assistant", "content": text, "tool_calls": calls}, CALLS, TEXTS),
    st.builds(lambda more: {"role": "assistant", "content": "x", "extra": more}, VALUES),
    st.builds(lambda parts, text: {"role": "user", "content": text or parts}, ODD_PARTS, TEXTS),
)
MESSAGE_ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(lambda text: {"role": "user", "content": [{"type": "tool_result", "content": text}]}, TEXTS),
    st.builds(lambda text: {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": text}}]}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
    st.just({"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "t0"}}]}),
    st.just({"role": "user", "content": []}),
)
RESPONSE_ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}, TEXTS),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, TEXTS),
    st.builds(lambda text: {"type": "reasoning", "content": [{"text": text}]}, TEXTS),
    st.just({"type": "message", "role": "assistant", "status": "incomplete", "content": "x"}),
)
ITEMS = {CHAT: CHAT_ITEMS, MESSAGES: MESSAGE_ITEMS, RESPONSES: RESPONSE_ITEMS}
NAMES = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
TOOLS = st.sampled_from([None, [], [{"name": "t0"}], [{"name": "t0"}, {"name": "t1"}], "no list"])
FIELDS = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "other", 1])},
    optional={
        "tools": TOOLS, "system": TEXTS, "instructions": TEXTS, "stream": st.booleans(), "max_tokens": st.just(5),
        "n": st.sampled_from([1, 2]), "cache_salt": TEXTS, "stream_options": st.none(), "priority": st.just(1),
        "kv_transfer_params": st.just({"a": 1}), "previous_response_id": st.sampled_from(["resp_x~t0@i", "resp_y@i"]),
        "store": st.booleans(),
    },
)  # fmt: skip
GARBAGE = st.sampled_from(
    [b"", b" ", b"}", b',"messages":[{"role":"user","content":"other"}]}', b',"inpu\\u0074":[]}', b',"model":"again"}',
     b',"m\\u006fdel":"escaped"}', b',"x":NaN}', b',"x":"\\ud800"}', b',"x":"\xff"}', b',"n":2,"n":3}']
)  # fmt: skip
"""The end of a body, in place of its last brace."""


@st.composite
def bodies_of(draw: st.DrawFn, path: str) -> list[bytes]:
    """Bodies of one client: a conversation that grows, is edited and is sent in other words."""
    items = draw(st.lists(ITEMS[path], min_size=2, max_size=8))
    shown, compact, ascii_only, first, bodies = draw(FIELDS), True, True, False, []
    for _ in range(draw(st.integers(3, 6))):
        change = draw(st.integers(-6, 11))
        if change <= 5:
            items = [*items, *draw(st.lists(ITEMS[path], min_size=1, max_size=4))]
        elif change == 6:
            place = draw(st.integers(0, len(items) - 1))
            items = [*items[:place], draw(ITEMS[path]), *items[place + 1 :]]
        elif change == 7:
            items = items[: draw(st.integers(0, len(items)))] or items
        elif change == 8:
            shown = draw(FIELDS)
        elif change == 9:
            first = not first
        elif change == 10:
            compact = not compact
        else:
            ascii_only = not ascii_only
        listed = {NAMES[path]: items}
        body = {**shown, **listed} if first else {**listed, **shown}
        text = json.dumps(body, ensure_ascii=ascii_only, separators=(",", ":") if compact else (" , ", " :\n"))
        raw = text.encode("utf-8", "surrogatepass")
        bodies.append(raw[:-1] + (draw(GARBAGE) if draw(st.integers(0, 9)) == 0 else b"}"))
    return bodies


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("limits", [{}, {"max_json_values": 40}, {"max_prompt_parts": 6}, {"max_json_bytes": 600}])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_body_reads_alike_whatever_was_known(path: str, limits: dict[str, int], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listed_json, "STRETCH_BYTES", STRETCH_BYTES)
        known = reader(**limits)
        for body in data.draw(bodies_of(path)):
            assert seen_by(known, path, body) == seen_by(reader(**limits), path, body)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_long_body_reads_like_a_short_one(path: str, data: st.DataObject) -> None:
    def shown(found: Seen) -> Any:
        if isinstance(found, str):
            return found
        values, prompt = found
        # A long body says in other words why it is no JSON, and where the model's name is.
        return {**values, "unread": bool(values["unread"]), "model_span": None}, prompt

    known = reader()
    for body in data.draw(bodies_of(path)):
        assert shown(seen_by(known, path, body)) == shown(seen_at_once(path, body))


# what is known ---------------------------------------------------------------------------------------------------
def turn(count: int, **fields: Any) -> bytes:
    """A chat of so many messages."""
    messages = [{"role": "user", "content": f"message {number} " + "x" * 40} for number in range(count)]
    return json.dumps({"messages": messages, "model": "m", **fields}, separators=(",", ":")).encode()


async def read_on(known: LongBodies, body: bytes, *, tenant: Tenant | None = TENANT, path: str = CHAT) -> int | None:
    """The bytes of the prompt that are known when a body is read, whose chain is made then; None: all are read."""
    read = await known.read(request_of(path, body, tenant), "id")
    assert read.prompt is not None
    prompt = read.prompt.prompt
    await chain_of(read.prompt)
    return prompt.begins.size if isinstance(prompt, ContinuedText) else None


def prompt_bytes(count: int) -> int:
    """The bytes of the prompt of such a chat."""
    return sum(len(f".user.message {number} ") + 40 for number in range(count))


async def test_a_conversation_is_read_from_its_last_message_on() -> None:
    known = reader()
    assert await read_on(known, turn(6)) is None
    for count in range(7, 40):
        assert await read_on(known, turn(count)) == prompt_bytes(count - 1)


async def test_the_same_body_is_read_from_a_message_before_the_last_on() -> None:
    known = reader()
    assert await read_on(known, turn(9)) is None
    assert await read_on(known, turn(9)) == prompt_bytes(8)
    assert await read_on(known, turn(5)) == prompt_bytes(4)


async def test_fields_around_the_conversation_may_differ_unless_they_change_its_prompt() -> None:
    known = reader()
    await read_on(known, turn(6, tools=[{"name": "t"}], temperature=0.1))
    body = json.loads(turn(7, tools=[{"name": "t"}], user="another", stream=True))
    before = json.dumps({"model": body.pop("model"), **dict(reversed(body.items()))}, separators=(",", ":")).encode()
    assert await read_on(known, before) == prompt_bytes(6) + len('{"tools":[{"name":"t"}]}')
    assert await read_on(known, turn(8, tools=[{"name": "other"}])) is None
    assert await read_on(known, turn(8)) is None


async def test_a_tenants_conversation_is_not_known_to_another_nor_to_another_api() -> None:
    known, other = reader(), Tenant("other")
    await read_on(known, turn(6))
    assert await read_on(known, turn(7), tenant=other) is None
    assert await read_on(known, turn(7), tenant=None) is None
    assert await read_on(known, turn(7), path=MESSAGES) is None
    assert await read_on(known, turn(8), tenant=other) == prompt_bytes(7)


async def test_a_conversation_of_other_blocks_is_read_whole_and_known_by_those() -> None:
    known = reader()
    for number in range(3):
        for model in ("m", "other"):
            read = await known.read(request_of(CHAT, turn(6 + number)), "id")
            assert await chain_of(read.prompt, model) == await chain_of(
                read_inference_request(request_of(CHAT, turn(6 + number)), "id").prompt, model
            )


async def test_a_pooled_prompt_and_one_for_a_tokenizer_are_read_whole() -> None:
    known = reader()
    await read_on(known, turn(6))
    read = await known.read(request_of(CHAT, turn(7)), "id")
    whole = read_inference_request(request_of(CHAT, turn(7)), "id")
    assert read.prompt is not None and whole.prompt is not None
    read.prompt.pooled = whole.prompt.pooled = True
    assert await chain_of(read.prompt) == await chain_of(whole.prompt)


async def test_a_salt_that_was_set_later_counts() -> None:
    known = reader()
    await read_on(known, turn(6))
    read = await known.read(request_of(CHAT, turn(7)), "id")
    whole = read_inference_request(request_of(CHAT, turn(7)), "id")
    assert read.prompt is not None and whole.prompt is not None
    read.prompt.salt = whole.prompt.salt = "the tenant's"
    assert await chain_of(read.prompt) == await chain_of(whole.prompt)


@pytest.mark.parametrize("tools", [None, [{"name": "t", "description": "x" * LONG_BODY_BYTES}]])
async def test_a_short_rest_is_read_at_once_while_a_long_body_is_read(tools: Any) -> None:
    known = reader()
    await read_on(known, turn(6, tools=tools))
    slow = asyncio.ensure_future(known.read(request_of(MESSAGES, turn(2000)), "long"))
    await asyncio.sleep(0)
    assert await read_on(known, turn(7, tools=tools)) is not None
    assert not slow.done()
    await slow


async def test_fields_of_a_known_kind_are_read_again_where_one_differs() -> None:
    known = reader()
    for count, limit in enumerate([5, 5, 7, 7, 5], start=6):
        read = await known.read(request_of(CHAT, turn(count, max_tokens=limit, model="other")), "id")
        assert read.prompt is not None and read.prompt.output_limit == limit
        body = turn(count, max_tokens=limit, model="other")
        assert read.model_span is not None and body[slice(*read.model_span)] == b'"other"'
        await chain_of(read.prompt)
    assert await read_on(known, turn(12, max_tokens=5, model="other")) == prompt_bytes(10)


LONG = 'a "long" {text}\n' * 4000


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_long_texts_are_known_like_any_others(path: str) -> None:
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": LONG}}]},
        {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "short"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": LONG}}]},
    ]
    fields = {"model": "m", "system": LONG, "tools": [{"name": "t", "description": LONG}]}
    known, found = reader(), []
    for count in range(1, 9):
        usual = parts if path == MESSAGES else parts[:3]  # a chat takes a use of tools for a medium
        messages = [usual[number % len(usual)] for number in range(count)]
        body = json.dumps({"messages": messages, **fields}, separators=(",", ":")).encode()
        read = await known.read(request_of(path, body), "id")
        scanned = await in_steps(known._read(request_of(path, body), "id"))
        assert read.prompt is not None and scanned.prompt is not None
        found.append(isinstance(read.prompt.prompt, ContinuedText))
        assert await chain_of(read.prompt) == await chain_of(scanned.prompt)
    assert found == [False, *[True] * 7]


async def test_a_number_in_a_long_text_is_not_read() -> None:
    known = reader()
    await read_on(known, turn(6))
    for count in range(6, 8):
        read = await known.read(request_of(CHAT, turn(count, max_tokens=" " * (1 << 17) + "5")), "id")
        assert "max_tokens" in read.unread


async def test_what_is_known_holds_no_body() -> None:
    known = reader()
    body = turn(50)
    request = request_of(CHAT, body)
    read = await known.read(request, "id")
    await chain_of(read.prompt)
    before = sys.getrefcount(body)
    del read
    assert sys.getrefcount(body) < before
    request.drop_body()
    assert sys.getrefcount(body) == 2, "its own name, and the argument"
