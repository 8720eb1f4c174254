"""A body whose beginning is known reads like any other: the same request, the same chain, the same refusals."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.api_bodies import listed_json
from dualmap.router.http.admission import LONG_BODY_BYTES, read_inference_request
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.long_bodies import LongBodies
from dualmap.router.prompts import known_bodies
from dualmap.router.steps import in_steps
from dualmap.scheduling.prompts.blocks import ContinuedText
from dualmap.scheduling.tenants.tenant import Tenant
from tests.support.conversations import (
    CHAT,
    FIELDS,
    GARBAGE,
    MESSAGES,
    RESPONSES,
    TENANT,
    TEXTS,
    Seen,
    bodies_of,
    chain_of,
    request_of,
    seen,
)

STRETCH_BYTES = 64
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of a few hundred bytes have several stretches and points."""
    monkeypatch.setattr(listed_json, "STRETCH_BYTES", STRETCH_BYTES)
    monkeypatch.setattr(known_bodies, "GRID_BYTES", STRETCH_BYTES)


def reader(**limits: int) -> LongBodies:
    return LongBodies(BodyBudget(1 << 30), **limits)


def seen_by(known: LongBodies, path: str, body: bytes) -> Seen:
    return asyncio.run(seen(lambda: known.read(request_of(path, body), "id")))


def seen_at_once(path: str, body: bytes) -> Seen:
    return asyncio.run(seen(lambda: read_inference_request(request_of(path, body), "id")))


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


@st.composite
def completions(draw: st.DrawFn) -> list[bytes]:
    """Bodies of one client whose prompt is a text that grows, is edited, and is sent in other words."""
    texts = draw(st.lists(TEXTS, min_size=1, max_size=6))
    shown, ascii_only, first, bodies = draw(FIELDS), True, True, []
    for _ in range(draw(st.integers(3, 6))):
        change = draw(st.integers(-4, 9))
        if change <= 5:
            texts = [*texts, *draw(st.lists(TEXTS, min_size=1, max_size=3))]
        elif change == 6:
            texts = [*texts[:-1], draw(TEXTS)]
        elif change == 7:
            shown = {**draw(FIELDS), **draw(st.sampled_from([{}, {"add_special_tokens": False}, {"echo": True}]))}
        elif change == 8:
            ascii_only = not ascii_only
        else:
            first = not first
        prompt = {"prompt": draw(st.sampled_from(["".join(texts)] * 9 + [texts, [1, 2], None, 7]))}
        text = json.dumps({**prompt, **shown} if first else {**shown, **prompt}, ensure_ascii=ascii_only)
        raw = text.encode("utf-8", "surrogatepass")
        bodies.append(raw[:-1] + (draw(GARBAGE) if draw(st.integers(0, 9)) == 0 else b"}"))
    return bodies


@pytest.mark.parametrize("limits", [{}, {"max_json_values": 8}, {"max_json_bytes": 400}])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_text_reads_alike_whatever_was_known(limits: dict[str, int], data: st.DataObject) -> None:
    known = reader(**limits)
    for body in data.draw(completions()):
        assert seen_by(known, COMPLETIONS, body) == seen_by(reader(**limits), COMPLETIONS, body)
        found, at_once = seen_by(reader(), COMPLETIONS, body), seen_at_once(COMPLETIONS, body)
        assert isinstance(found, str) == isinstance(at_once, str)
        if not (isinstance(found, str) or isinstance(at_once, str)):
            assert found[1] == at_once[1]
            differing = {"unread", "model_span"}
            assert {name: value for name, value in found[0].items() if name not in differing} == {
                name: value for name, value in at_once[0].items() if name not in differing
            }


async def test_a_text_is_read_from_the_end_of_the_former_one_on() -> None:
    known, text = reader(), 'he said "hi"\n' * 20
    for more in ("", "more é\n", '"', " \\ and more"):
        before, text = len(text.encode()), text + more
        body = json.dumps({"model": "m", "prompt": text, "max_tokens": 5}, ensure_ascii=False).encode()
        assert await read_on(known, body, path=COMPLETIONS) == (before if more else None)
    body = json.dumps({"model": "m", "prompt": "x" + text}).encode()
    assert await read_on(known, body, path=COMPLETIONS) is None


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
