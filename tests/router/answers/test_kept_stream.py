"""Kept streams: what is kept and what passes, however a stream is cut, and within bounds."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.router.answers import kept_stream
from dualmap.router.answers.checks import ABORTED
from dualmap.router.answers.failures import failure_in
from dualmap.router.answers.kept_stream import KeptBudget, KeptStream, without_ids
from dualmap.router.answers.sse import event_object
from dualmap.router.http.reading import read_so_far
from dualmap.router.prompts.inference_request import MESSAGES_PATH, RESPONSES_PATH

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def chunk(path: str, text: str, ids: list[int] | None, prompt_ids: list[int] | None = None) -> dict[str, Any]:
    if path == CHAT:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return {"id": "x", "choices": [choice | {"token_ids": ids}], "prompt_token_ids": prompt_ids}
    choice = {"index": 0, "text": text, "logprobs": None, "prompt_token_ids": prompt_ids, "token_ids": ids}
    return {"id": "x", "choices": [choice]}


texts = st.text(min_size=1, max_size=9) | st.sampled_from(['"token_ids":[1]', '\\"token_ids\\":[', "]", '"error"'])
tokens = st.lists(st.integers(0, 200_000), min_size=1, max_size=4)
events = st.lists(st.tuples(texts, tokens), min_size=1, max_size=12)


@given(
    path=st.sampled_from([CHAT, COMPLETION]),
    said=events,
    prompt_ids=st.lists(st.integers(0, 99), min_size=1, max_size=9),
    cuts=st.lists(st.integers(0, 4000), max_size=8),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    comment=st.booleans(),
)
def test_however_a_stream_is_cut_it_passes_by_whole_events_without_ids_and_is_read_in_full(
    path: str, said: list[tuple[str, list[int]]], prompt_ids: list[int], cuts: list[int], end: bytes, comment: bool
) -> None:
    asked = [chunk(path, text, ids, None if at else prompt_ids) for at, (text, ids) in enumerate(said)]
    unasked = [chunk(path, text, None) for text, _ in said]
    wire = b"".join(b"data: " + orjson.dumps(each) + end for each in asked)
    expected = b"".join(b"data: " + orjson.dumps(each) + end for each in unasked)
    if comment:
        wire, expected = b": ping\n\n" + wire, b": ping\n\n" + expected
    budget = KeptBudget(1 << 20)
    kept = KeptStream(path, budget, 100, hides_ids=True)

    places = sorted({0, *(cut for cut in cuts if cut < len(wire)), len(wire)})
    passed = [kept.feed(wire[start:stop]) for start, stop in pairwise(places)]

    assert b"".join(passed) + kept.end() == expected
    assert all(re.search(rb"(\r?\n){2}\Z|\A:[^\n]*\n\Z", each) for each in passed if each), "or a comment's line"
    so_far = asyncio.run(read_so_far(kept))
    assert so_far.text == "".join(text for text, _ in said)
    assert list(so_far.token_ids) == [token for _, ids in said for token in ids]
    assert so_far.prompt_tokens == len(prompt_ids)
    kept.release()
    assert budget.held_bytes == 0


async def test_a_stream_whose_ids_the_client_asked_for_passes_as_it_is() -> None:
    wire = b"data: %b\n\n" % orjson.dumps(chunk(COMPLETION, "a", [7], [1, 2]))
    kept = KeptStream(COMPLETION, KeptBudget(1 << 20), 0, hides_ids=False)

    assert kept.feed(wire) == wire
    so_far = await read_so_far(kept)
    assert (list(so_far.token_ids), so_far.prompt_ids) == ([7], b"1,2")


async def test_what_was_read_takes_little_memory() -> None:
    budget, event = KeptBudget(1 << 30), b"data: %b\n\n" % orjson.dumps(chunk(CHAT, "word", [12345]) | {"x": "y" * 300})
    kept = KeptStream(CHAT, budget, 1000, hides_ids=True)

    for _ in range(3000):  # a megabyte of events
        kept.feed(event)

    assert budget.held_bytes < 120_000
    so_far = await read_so_far(kept)
    assert (so_far.tokens, so_far.chars) == (3000, 12_000)


@pytest.mark.parametrize(("limit_bytes", "longest"), [(40_000, 1 << 30), (1 << 30, 40_000)])
def test_a_stream_that_is_too_long_or_finds_no_memory_is_not_kept_and_passes_on(
    limit_bytes: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_stream, "MAX_BYTES", longest)
    budget, event = KeptBudget(limit_bytes), b"data: %b\n\n" % orjson.dumps(chunk(CHAT, "word", [1]))
    kept = KeptStream(CHAT, budget, 30_000, hides_ids=True)

    passed = [kept.feed(event) for _ in range(1000)]

    assert set(passed) == {without_ids(event)}
    assert kept.lost
    assert (budget.held_bytes, budget.lost) == (0, 1)
    assert len(kept._events) < 300


def test_an_event_that_never_ends_passes_in_parts_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_stream, "MAX_EVENT_BYTES", 1000)
    budget, event = KeptBudget(1 << 20), b"data: %b\n\n" % orjson.dumps(chunk(CHAT, "word", [1]))
    kept = KeptStream(CHAT, budget, 0, hides_ids=True)
    kept.feed(event)
    assert budget.held_bytes > 0

    passed = b"".join([kept.feed(b"data: " + b"x" * 400) for _ in range(4)])

    assert len(passed) > 1000
    assert kept.lost
    assert (budget.held_bytes, budget.lost) == (0, 1)
    kept.feed(b"\n\n")
    for _ in range(1000):
        kept.feed(event)
    kept.release()
    assert (budget.held_bytes, budget.lost) == (0, 1)


def test_nothing_is_lost_of_an_event_that_is_too_long_and_has_a_word_of_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_stream, "MAX_EVENT_BYTES", 1000)
    kept = KeptStream(CHAT, KeptBudget(1 << 20), 0, hides_ids=False)
    kept.watch = lambda _, event: failure_in(event, event_object(event))
    said = b"data: %b\n\n" % orjson.dumps(chunk(CHAT, "word", [1]))
    wire = [said, said, b'data: {"text": ["error", "' + b"x" * 1000, b'"]}\n\n', said]

    assert b"".join(map(kept.feed, wire)) + kept.end() == b"".join(wire)


async def test_an_aborted_message_is_kept_back_and_goes_on_in_a_block_of_its_own() -> None:
    def named(event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\ndata: ".encode() + orjson.dumps(event) + b"\n\n"

    def events(delta: str | None) -> list[bytes]:
        block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
        said = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "one "}, "index": 0}
        return [
            named({"type": "message_start", "message": {"id": "x", "stop_reason": None}}),
            named(block),
            named(said),
            named({"type": "content_block_stop", "index": 0}),
            named({"type": "message_delta", "delta": {"stop_reason": delta}, "usage": {"output_tokens": 1}}),
            named({"type": "message_stop"}),
        ]

    def kept(delta: str | None) -> tuple[KeptStream, bytes]:
        stream = KeptStream(MESSAGES_PATH, KeptBudget(1 << 20), 10, hides_ids=False)
        stream.watch = lambda _, event: failure_in(event, event_object(event))
        return stream, b"".join(stream.feed(event) for event in events(delta))

    whole, passed = kept("end_turn")
    assert (whole.failure, passed) == (None, b"".join(events("end_turn")))
    aborted, passed = kept(None)
    assert (aborted.failure, passed) == (ABORTED, b"".join(events(None)[:4]))
    so_far = await read_so_far(aborted)
    assert (so_far.text, so_far.block, so_far.begin_block()) == ("one ", None, 1)


def response_event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


RESPONSE_TEXT = [
    response_event("response.created", response={"status": "in_progress"}),
    response_event("response.output_item.added", item={"type": "message", "id": "m"}),
    response_event("response.content_part.added", part={"type": "output_text"}),
    response_event("response.output_text.delta", delta='half "response.output_text.done"'),
]
MESSAGE_END = [
    response_event("response.output_text.done", text="half"),
    response_event("response.content_part.done", part={"type": "output_text"}),
    response_event("response.output_item.done", item={"type": "message", "id": "m"}),
]
COMPLETED = response_event("response.completed", response={"status": "completed"})
CANCELLED = response_event("response.completed", response={"status": "cancelled"})


def kept_response() -> KeptStream:
    kept = KeptStream(RESPONSES_PATH, KeptBudget(1 << 20), 100, hides_ids=False)
    kept.watch = lambda _, event: failure_in(event, event_object(event))
    return kept


@pytest.mark.parametrize("together", [False, True])
async def test_the_end_of_a_message_passes_with_what_follows_it(together: bool) -> None:
    kept = kept_response()
    ends = [b"".join([*MESSAGE_END, COMPLETED])] if together else [*MESSAGE_END, COMPLETED]

    begin = b"".join(kept.feed(event) for event in RESPONSE_TEXT)
    assert (begin, kept.is_plain) == (b"".join(RESPONSE_TEXT), True)
    *held, last = [(kept.feed(data), kept.is_plain) for data in ends]

    assert held == [(b"", False)] * len(held)
    assert last == (b"".join([*MESSAGE_END, COMPLETED]), True)
    assert (await read_so_far(kept)).finished


@pytest.mark.parametrize("together", [False, True])
async def test_the_end_of_a_message_that_was_aborted_does_not_pass(together: bool) -> None:
    kept = kept_response()
    for event in RESPONSE_TEXT:
        kept.feed(event)
    ends = [b"".join([*MESSAGE_END, CANCELLED])] if together else [*MESSAGE_END, CANCELLED]

    assert b"".join(kept.feed(data) for data in ends) == b""
    assert kept.failure is ABORTED and kept.end() == b""
    so_far = await read_so_far(kept)
    assert so_far.response is not None and so_far.response.message is not None


def test_the_end_of_a_message_passes_where_the_stream_ends_with_it() -> None:
    kept = kept_response()
    for event in [*RESPONSE_TEXT, *MESSAGE_END]:
        kept.feed(event)

    assert kept.end() == b"".join(MESSAGE_END)


def test_another_item_that_ends_passes_at_once() -> None:
    kept = kept_response()
    call = response_event("response.output_item.done", item={"type": "function_call"})

    assert kept.feed(b"".join([*RESPONSE_TEXT, *MESSAGE_END, call])).endswith(call)


async def test_a_comment_passes_before_the_end_of_a_message_that_is_held() -> None:
    kept = kept_response()
    for event in RESPONSE_TEXT:
        kept.feed(event)

    assert kept.feed(b"".join([MESSAGE_END[0], b": ping\n\n", *MESSAGE_END[1:], b": ping\n\n"])) == b": ping\n\n" * 2
    assert kept.holds_end
    assert kept.feed(CANCELLED) == b"" and kept.failure is ABORTED
