"""Usage is asked for, and taken out of the stream."""

from __future__ import annotations

import sys
from types import FrameType

import orjson
import pytest

from dualmap.router.answers.usage_remover import _MAX_HELD_BYTES, UsageRemover
from dualmap.router.http.body_edits import USAGE_FIELD, edited, field_edit

TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("body", [b'{"a":1}', b' \n{ "a" : 1 }'])
def test_the_option_is_added_and_no_other_byte_changes(body: bytes) -> None:
    asking = b"".join(edited(body, [field_edit(body, USAGE_FIELD)]))
    assert orjson.loads(asking) == {"a": 1, "stream_options": {"include_usage": True}}
    assert asking.replace(b',"stream_options":{"include_usage":true}', b"") == body


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("cut", [1, 2, 3, 10, 61, 1000])
def test_the_event_of_usage_alone_is_missing(line_end: bytes, cut: int) -> None:
    stream = (TOKEN + b": comment\n\n" + USAGE + DONE).replace(b"\n", line_end)
    remover = UsageRemover()
    passed = b"".join(remover.feed(stream[at : at + cut]) for at in range(0, len(stream), cut)) + remover.end()
    assert passed == (TOKEN + b": comment\n\n" + DONE).replace(b"\n", line_end)


def test_comments_pass_at_once_and_those_beside_the_usage_stay() -> None:
    remover = UsageRemover()
    assert remover.feed(b": one\n") == b": one\n"
    assert remover.feed(b": two\n" + USAGE[:9]) == b": two\n"
    assert remover.feed(USAGE[9:-1] + b": three\n\n" + DONE) == b": three\n" + DONE


def test_usage_beside_a_choice_was_not_asked_for_and_all_of_it_stays() -> None:
    event = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}\n\n'
    remover = UsageRemover()
    assert not remover.sends_unrequested
    assert remover.feed(event) == event
    assert remover.sends_unrequested
    assert remover.feed(USAGE + USAGE[:9]) == USAGE + USAGE[:9]


LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
SIGNED = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"system_fingerprint":"f"}\n\n'
SIGNED_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3},"system_fingerprint":"f"}\n\n'


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("cut", [1, 2, 3, 10, 61, 1000])
def test_the_fingerprint_goes_back_to_the_event_with_the_finish_reason(line_end: bytes, cut: int) -> None:
    asked, unasked = (
        (TOKEN + last + usage + DONE).replace(b"\n", line_end) for last, usage in ((LAST, SIGNED_USAGE), (SIGNED, b""))
    )
    remover = UsageRemover()
    passed = b"".join(remover.feed(asked[at : at + cut]) for at in range(0, len(asked), cut)) + remover.end()
    assert passed == unasked


def test_an_event_with_a_finish_reason_waits_for_the_next_event_alone() -> None:
    remover = UsageRemover()
    assert remover.feed(TOKEN + LAST) == TOKEN
    assert remover.held == LAST
    assert remover.feed(LAST) == LAST, "of another choice"
    assert remover.feed(DONE) == LAST + DONE
    assert remover.end() == b""


def test_only_what_is_passed_counts_as_the_end_of_an_event() -> None:
    remover = UsageRemover()
    assert remover.feed(TOKEN + USAGE[:9]) == TOKEN
    assert remover.between_events


def test_an_event_that_is_too_long_to_be_usage_passes_in_parts() -> None:
    remover = UsageRemover()
    long = b"data: " + b"x" * _MAX_HELD_BYTES
    assert remover.feed(long) == long
    assert not remover.between_events
    assert remover.feed(b"y\n\n" + TOKEN) == b"y\n\n" + TOKEN
    assert remover.between_events
    assert remover.feed(USAGE + DONE) == DONE


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
@pytest.mark.parametrize("rest", [b"data: [DONE]", b"data: [DONE]\n", b'data: {"x":"' + b"y" * 200_000 + b'"}\n\n'])
def test_what_does_not_come_as_a_whole_event_stays_behind_the_event_with_the_finish_reason(
    rest: bytes, cut: int
) -> None:
    stream = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n' + rest
    remover = UsageRemover()
    passed = [remover.feed(stream[at : at + cut]) for at in range(0, len(stream), cut)]
    assert b"".join(passed) + remover.end() == stream


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_comments_and_empty_lines_stay_where_they_are(cut: int) -> None:
    stream = b"".join(event + between for event in (TOKEN, LAST, DONE) for between in (b":\n\n", b"\n"))
    remover = UsageRemover()
    passed = [remover.feed(stream[at : at + cut]) for at in range(0, len(stream), cut)]
    assert b"".join(passed) + remover.end() == stream


def test_a_comment_does_not_part_the_fingerprint_from_its_event_unless_nothing_else_comes() -> None:
    usage, ping = USAGE.replace(b"{", b'{"system_fingerprint":"f",', 1), b": ping - 2026-01-01 00:00:00.000000\n\n"
    remover = UsageRemover()
    assert remover.feed(LAST) == remover.feed(ping) == b""
    assert remover.feed(usage + DONE) == LAST.replace(b"}\n\n", b',"system_fingerprint":"f"}\n\n') + ping + DONE
    remover = UsageRemover()
    assert remover.feed(LAST) == remover.feed(ping) == b""
    assert remover.feed(ping) == LAST + ping + ping, "the usage does not come soon"


def test_a_chunk_without_usage_or_an_end_passes_without_a_further_call() -> None:
    remover, chunk = UsageRemover(), b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        passed_on = [remover.feed(chunk) for _ in range(3)]
    finally:
        sys.setprofile(None)
    assert passed_on == [chunk] * 3 and called.count("UsageRemover.feed") == 3
    assert {*called} <= {"UsageRemover.feed", called[0]}, "the comprehension, and nothing else"
