"""Reading streams however they are cut."""

from __future__ import annotations

import orjson
import pytest

from dualmap.simulation.replay.answer_stream import AnswerStream

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


def text(content: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}]}


def events(*chunks: dict[str, object], done: bool = True) -> bytes:
    lines = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
    return lines + (b"data: [DONE]\n\n" if done else b"")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("piece", [1, 7, 100_000])
def test_a_stream_reads_the_same_however_it_is_cut(piece: int, line_end: bytes) -> None:
    data = b": a comment\n\n" + events(ROLE, text("one "), text("two", "length"), USAGE)
    data = data.replace(b"\n", line_end)
    stream = AnswerStream(lambda: 5.0)
    for at in range(0, len(data), piece):
        stream.feed(data[at : at + piece])
    stream.close()
    assert stream.first_content_s == 5.0
    assert stream.finish_reason == "length"
    assert stream.usage["prompt_tokens"] == 7
    assert stream.done
    assert stream.error is None


def test_a_role_is_no_content_but_text_reasoning_and_tool_calls_are() -> None:
    for chunk, has_content in (
        (ROLE, False),
        (text("x"), True),
        ({"choices": [{"text": "x"}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "x"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
    ):
        stream = AnswerStream(lambda: 1.0)
        stream.feed(events(chunk, done=False))
        assert (stream.first_content_s is not None) is has_content


def test_the_end_of_a_very_long_stream_is_kept() -> None:
    stream = AnswerStream(lambda: 1.0)
    for _ in range(3000):
        stream.feed(events(text("word " * 10), done=False))
    stream.feed(events(text("end", "stop"), USAGE))
    stream.close()
    assert (stream.finish_reason, stream.done, stream.usage["completion_tokens"]) == ("stop", True, 2)


def test_an_error_in_the_stream_is_found_and_a_cut_is_not_done() -> None:
    failed = AnswerStream(lambda: 1.0)
    failed.feed(events(text("x"), {"error": {"message": "engine died", "code": 500}}))
    failed.close()
    assert failed.error == "engine died"
    cut = AnswerStream(lambda: 1.0)
    cut.feed(events(text("x"), done=False) + b'data: {"cho')
    cut.close()
    assert not cut.done


@pytest.mark.parametrize(("code", "word"), [("no_instance", "no_instance"), (503, None)])
def test_an_error_in_place_of_a_stream_names_its_code(code: object, word: str | None) -> None:
    refused = AnswerStream(lambda: 1.0)
    refused.feed(orjson.dumps({"error": {"message": "no instance is ready", "code": code}}))
    refused.close()
    assert (refused.error, refused.error_code) == ("no instance is ready", word)
