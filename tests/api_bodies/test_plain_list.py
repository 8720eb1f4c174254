"""What is read in C of bodies with plain messages is what Python reads of them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dualmap.api_bodies.plain_list import NAMES, NATIVE, Api, PlainList, plain_list
from dualmap.api_bodies.prompt import chat_prompt
from tests.api_bodies.fuzz_plain_list import ONLY, body_of, is_read_right
from tests.support.sanitized import ROOT, run_sanitized, sanitized

native = pytest.mark.skipif(NATIVE is None, reason="nothing native reads bodies")
QUOTED_ONLY = json.dumps(ONLY).encode()
USER = {"role": "user", "content": "hi"}


def body(*messages: Any, api: Api = Api.CHAT, **fields: Any) -> bytes:
    return json.dumps({"model": "m", NAMES[api]: messages, **fields}).encode()


def read(text: bytes) -> PlainList | None:
    return plain_list(text, Api.CHAT, QUOTED_ONLY)


@native
def test_a_frame_is_the_body_with_one_string_in_place_of_its_messages() -> None:
    found = read(body({"role": "system", "content": "be brief"}, USER, stream=True))

    assert found is not None
    assert json.loads(found.frame) == {"model": "m", "messages": [ONLY], "stream": True}
    assert found.text == b"\xffsystem\xfebe brief\xffuser\xfehi"


@native
def test_further_fields_of_a_chats_messages_are_written_as_its_prompt_has_them() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": "\\u00e9\\n"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"tool_call_id": "c", "role": "tool", "content": "out"},
    ]

    found = read(body(*messages))

    assert found is not None and found.text == chat_prompt({"messages": messages}).data


@native
@pytest.mark.parametrize(
    "odd",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "user", "content": ["text"]},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": "hi", "tool_calls": "no list"},
        {"role": "system", "content": "x-anthropic-billing-header: 1\nbe brief"},
        {"content": "hi"},
        "hi",
    ],
)
def test_messages_that_are_not_plain_are_left_to_python(odd: Any) -> None:
    assert read(body(USER, odd)) is None
    assert read(body(USER)) is not None


@native
@pytest.mark.parametrize(
    "raw",
    [
        b'{"role":"user","role":"user","content":"a"}',
        b'{"role":"user","content":"a","content":"b"}',
        b'{"r\\u006fle":"user","content":"a"}',
        b'{"role":"us\\u0065r","content":"a"}',
        b'{"role":"user","content":"\\ud800"}',
        b'{"role":"user","content":"\\ude00\\ud83d"}',
        b'{"role":"user","content":"\xed\xa0\x80"}',
        b'{"role":"user","content":"\xc0\x80"}',
        b'{"role":"user","content":"\xf4\x90\x80\x80"}',
        b'{"role":"user","content":"a\nb"}',
        b'{"role":"user","content":"a\x00b"}',
        b'{"role":"user","content":"\\x"}',
        b'{"role":"user","content":"\\u12G4"}',
        b'{"role":"user","content":"a","x":1e400}',
        b'{"role":"user","content":"a","x":01}',
        b'{"role":"user","content":"a","x":99999999999999999999}',
        b'{"role":"user","content":"a","x":%b1%b}' % (b"[" * 5000, b"]" * 5000),
        b'{"role":"user","content":"a"',
        b'{"role":"user","content":"a',
        b'{"role":"user","content":"a"}}',
    ],
)
def test_what_readers_may_differ_about_is_left_to_python(raw: bytes) -> None:
    assert read(b'{"messages":[%b],"model":"m"}' % raw) is None


@native
@pytest.mark.parametrize("api", list(Api))
def test_plain_bodies_and_nearly_plain_ones_are_read_as_python_reads_them(api: Api) -> None:
    random, right, tries = Random(2), 0, 6000

    for _ in range(tries):
        right += is_read_right(NATIVE, body_of(random, NAMES[api]), api)

    assert tries / 8 < right < tries


@native
def test_a_text_of_a_hundred_megabytes_is_read() -> None:
    text = "x" * 100_000_000

    found = read(body({"role": "user", "content": text}))

    assert found is not None and found.text == b"\xffuser\xfe" + text.encode()


def test_a_reader_under_sanitizers_touches_nothing_beyond_its_body(tmp_path: Path) -> None:
    made = sanitized(ROOT / "dualmap/api_bodies/plain_list.c", tmp_path)

    assert int(run_sanitized("tests.api_bodies.fuzz_plain_list", str(made), "6000")) > 600
