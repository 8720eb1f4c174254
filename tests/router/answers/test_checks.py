"""A body under a status of success may be no answer."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from dualmap.router.answers.checks import (
    body_type,
    ends_whole,
    failure_of_object,
    retry_after_s,
    shows_end,
    starts_events,
)
from dualmap.scheduling.request.outcome import FailureKind

JSON = b"application/json"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        (JSON, b'{"choices":[]}', None),
        (JSON, b' \r\n{"choices":[]}', None),
        (JSON, b"[1]", None),
        (b"", b'{"choices":[]}', None),
        (b"application/octet-stream", b"\x00\x01", None),
        (b"audio/wav", b"RIFF", None),
        (JSON, b"", FailureKind.NO_ANSWER),
        (b"", b"", FailureKind.NO_ANSWER),
        (JSON, b" \n", FailureKind.NO_ANSWER),
        (b"text/html; charset=utf-8", b"<!doctype html>", FailureKind.NO_ANSWER),
        (b"Text/HTML", b"<html>", FailureKind.NO_ANSWER),
        (JSON, b"<html>", FailureKind.NO_ANSWER),
        (b"", b"<html>", FailureKind.NO_ANSWER),
        (b"text/plain", b"OK", FailureKind.NO_ANSWER),
        (JSON, b'{"error":{"message":"broken","code":503}}', FailureKind.STATUS),
        (JSON, b'{"object":"error","message":"broken"}', FailureKind.STATUS),
        (JSON, b'{"error":{"message":"yours","code":400}}', None),
        (JSON, b'{"error":null,"output":[]}', None),
        (JSON, b'{"error":"","output":[]}', None),
        (JSON, b'{"error":{},"output":[]}', None),
        (JSON, b'{"error":"broken"}', FailureKind.STATUS),
        (JSON, b'{"object":"error","message":"yours","code":400}', None),
        (JSON, b"\xef\xbb\xbf" + b'{"choices":[]}', None),
        (JSON, b'data: {"choices":[]}\n\n', None),
        (b"", b": busy\n\n", None),
        (b"text/plain", b"event: message_start\ndata: {}\n\n", None),
        (b"application/x-ndjson", b'{"error":{"message":"a line"}}', None),
        (JSON, b'{"choices":[{"finish_reason":"abort"}]}', FailureKind.ABORTED),
        (JSON, b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\""}]}', None),
    ],
)
def test_an_answer_is_told_from_what_is_none(content_type: bytes, body: bytes, kind: FailureKind | None) -> None:
    failure = failure_of_object(body, readable=body_type(content_type, None)[0])
    assert (failure and failure.kind) is kind


def test_what_is_compressed_is_not_judged() -> None:
    assert failure_of_object(b"\x1f\x8b", readable=body_type(JSON, b"gzip")[0]) is None
    assert body_type(JSON, b"br") == (False, False) and body_type(JSON, b" Identity") == (True, False)
    assert body_type(b"Text/Event-Stream; charset=utf-8", None) == (True, True)
    assert body_type(b"text/event-stream", b"gzip") == (False, False)


@pytest.mark.parametrize(
    "start", [b"data: {}", b"data:{}", b": busy", b":\n", b"event: x", b"id: 1", b"retry: 5", b"\r\ndata:"]
)
def test_an_event_stream_shows_itself_by_its_first_line(start: bytes) -> None:
    assert starts_events(start) and starts_events(b"\xef\xbb\xbf" + start)
    assert not starts_events(b"{" + start) and not starts_events(b"<" + start)


@pytest.mark.parametrize(
    ("path", "tail", "whole"),
    [
        (CHAT, b"data: {}\n\ndata: [DONE]\n\n", True),
        (CHAT, b"data: {}\r\rdata: [DONE]\r\r", True),
        (CHAT, b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', True),
        (CHAT, b'data: {"choices":[{"finish_reason":null}]}\n\ndata: {"usage":{}}\n\n', False),
        (CHAT, b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""}}]}\n\n', False),
        (CHAT, b'data: {"error":{"message":"x"}}\n\n', True),
        (CHAT, b"", False),
        (MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (MESSAGES, b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n', False),
        (MESSAGES, b'event: error\ndata: {"type":"error"}\n\n', True),
        (MESSAGES, b'event: message_stop\rdata: {"type":\rdata: "message_stop"}\r\r', True),
        (MESSAGES, b'data: {"a":1,\ndata: "type":\ndata: "message_stop"}\n\n', True),
        (CHAT, b'data: {"choices":[{"finish_reason":\r\ndata: "stop"}]}\r\n\r\n', True),
        (RESPONSES, b'event: response.completed\ndata: {"type":"response.completed"}\n\n', True),
        (RESPONSES, b'event: x\ndata: {"a":1,"type":"response.incomplete"}\n\n', True),
        (RESPONSES, b'data: {}\n\nevent: response.output_text.delta\ndata: {"delta":"x"}\n\n', False),
        ("/v1/audio/transcriptions", b"data: {}\n\n", True),  # how those end is not known here
    ],
)
def test_a_stream_that_ends_without_its_end_is_not_whole(path: str, tail: bytes, whole: bool) -> None:
    assert ends_whole(path, [tail]) is whole


def test_a_last_event_longer_than_what_is_kept_is_given_the_benefit_of_the_doubt() -> None:
    assert ends_whole(RESPONSES, [b"x" * 4000, b"y" * 4000 + b"\n\n"])


@pytest.mark.parametrize(
    ("value", "expected_s"),
    [
        (None, None),
        (b"7", 7.0),
        (b" 1.5 ", 1.5),
        (b"-3", 0.0),
        (b"Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        (b"Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        (b"soon", None),
        (b"", None),
    ],
)
def test_a_pause_is_read_as_seconds_or_as_a_date(value: bytes | None, expected_s: float | None) -> None:
    assert retry_after_s(value, 60.0) == expected_s


def test_the_end_of_a_stream_that_says_it_is_done_is_not_searched() -> None:
    """A burst leaves hundreds of kilobytes of last reads, in which a search takes milliseconds."""
    tail = [b'data: {"choices":[{"finish_reason":null}]}\n\n' * 5000, b"data: [DONE]\n\n"]
    called: list[str] = []

    def note(_: FrameType, event: str, function: object) -> None:
        if event == "c_call":
            called.append(getattr(function, "__name__", ""))

    sys.setprofile(note)
    try:
        whole = ends_whole(CHAT, tail)
    finally:
        sys.setprofile(None)
    assert whole and "search" not in called


@pytest.mark.parametrize(
    ("path", "tail", "ends"),
    [
        (CHAT, b'data: {"choices":[]}\n\ndata: [DONE]\n\n', True),
        (CHAT, b"data: [DONE]", True),
        (CHAT, b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', False),  # usage, or another choice, may come
        (MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (MESSAGES, b'data: {"type":"content_block_delta"}\n\n', False),
        (RESPONSES, b'data: {"type":"response.completed","response":{}}\n\n', True),
        ("/v1/audio/transcriptions", b"data: [DONE]\n\n", False),
        (CHAT, b"", False),
    ],
)
def test_the_last_event_of_a_stream_is_known(path: str, tail: bytes, ends: bool) -> None:
    assert shows_end(path, [tail[:5], tail[5:]]) is ends
