from __future__ import annotations

import random

import orjson
import pytest

from dualmap.router.answers.sse import (
    Ending,
    EventEditor,
    EventSplitter,
    ending_of_stream,
    ends_event,
    event_data,
    event_object,
    is_comment,
    is_error,
    starts_output,
)
from dualmap.scheduling.request.outcome import Usage


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields}]}


def random_stream(rng: random.Random, events: int = 40) -> bytes:
    """Any stream that the grammar of WHATWG HTML allows, its line ends mixed."""
    ends = rng.choice([[b"\n"], [b"\r\n"], [b"\r"], [b"\n", b"\r\n", b"\r"]])
    lines = [b"data: x", b"data:y", b"data", b"data:", b": comment", b":", b"event: e", b"id", b"retry: 5", b"other"]
    stream = rng.choice([b"", b"\xef\xbb\xbf"])
    for _ in range(events):
        for line in [*rng.choices(lines, k=rng.randint(0, 4)), b""]:
            end = rng.choice(ends)
            # A CR and the LF of a following empty line would be read as one line end.
            stream += line + (b"\r\n" if not line and end == b"\n" and stream.endswith(b"\r") else end)
    return stream


def in_pieces(rng: random.Random, stream: bytes) -> list[bytes]:
    pieces, most = [], rng.choice([1, 3, 30, 300])
    while stream:
        size = rng.randint(1, most)
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


def dispatched(stream: bytes) -> list[bytes]:
    """The events that a client gets of a stream, read line by line as the standard says."""
    messages, data = [], []
    lines = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    for line in lines[:-1]:
        name, _, value = line.partition(b":")
        if line and name == b"data":
            data.append(value.removeprefix(b" "))
        elif not line and data:
            messages.append(b"\n".join(data))
            data = []
    return messages


@pytest.mark.parametrize("seed", range(60))
def test_the_splitter_finds_the_events_that_a_client_does_however_the_stream_is_written_and_cut(seed: int) -> None:
    rng = random.Random(seed)
    stream = random_stream(rng)
    splitter = EventSplitter(1000)
    events, come = [], b""
    for piece in in_pieces(rng, stream):
        events += splitter.feed(piece)
        come += piece
        read = [event_data(event) for event in events if event_data(event) or b"data" in event]
        assert read == dispatched(come), "an event is found with the byte that ends it"
        assert b"".join(events) + splitter.rest == come
    assert all(ends_event(event) for event in events)


@pytest.mark.parametrize("seed", range(60))
def test_an_edited_stream_has_all_bytes_of_the_events_that_are_not_edited(seed: int) -> None:
    rng = random.Random(seed)
    stream = random_stream(rng)

    same = EventEditor(lambda event: event, 20)
    passed = b"".join(map(same.feed, in_pieces(rng, stream))) + same.end()
    without = EventEditor(lambda event: b"" if b"data:y" in event else event, 1000)
    left = b"".join(map(without.feed, in_pieces(rng, stream))) + without.end()

    assert passed == stream
    assert dispatched(left) == [message for message in dispatched(stream) if b"y" not in message]


@pytest.mark.parametrize("comment", [b": c\n", b": c\r\n", b":\r", b": c\n\n", b"\n", b"\xef\xbb\xbf: c\n"])
def test_a_comment_passes_at_once(comment: bytes) -> None:
    editor = EventEditor(lambda event: event, 1000)
    assert editor.feed(comment + b"data: x") == comment
    assert editor.feed(b"\n\n" + comment.removeprefix(b"\xef\xbb\xbf")).startswith(b"data: x\n\n")
    assert editor.end() == b""


def test_a_comment_is_whole_lines_that_begin_with_a_colon() -> None:
    assert is_comment(b": a\r\n:b\n\n") and is_comment(b"\n\n")
    assert not is_comment(b": a\ndata: x\n\n") and not is_comment(b"data: :\n\n")


def test_an_event_over_the_limit_is_known_as_such_even_when_it_comes_in_drops() -> None:
    splitter = EventSplitter(100)
    for _ in range(100):
        splitter.feed(b"x")
    assert not splitter.too_long
    splitter.feed(b"x")
    assert splitter.too_long


def test_data_lines_are_joined_and_comments_carry_nothing() -> None:
    assert event_data(b"data: a\ndata:b") == b"a\nb"
    assert event_data(b": ping") == b""
    assert event_data(b'event: delta\r\ndata: {"a":1}') == b'{"a":1}'
    assert event_data(b"\xef\xbb\xbfdata: a\rdata\r\r") == b"a\n"
    assert event_object(b'data: {"a":\ndata:  1}\n\n') == {"a": 1}
    assert event_object(b"data: [DONE]") is None
    assert event_object(b"data: {broken") is None


@pytest.mark.parametrize(
    "value",
    [
        delta(content="x"),
        delta(reasoning_content="x"),
        delta(reasoning="x"),
        delta(tool_calls=[{"index": 0}]),
        {"choices": [{"index": 0, "text": "x"}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "text": "", "token_ids": [5]}]},
        {"choices": [], "usage": {"completion_tokens": 1}},
        {"type": "response.output_text.delta", "delta": "x"},
        {"type": "content_block_delta"},
        {"type": "response.completed"},
    ],
)
def test_content_of_every_kind_is_the_first_token(value: dict[str, object]) -> None:
    assert starts_output(orjson.loads(orjson.dumps(value)))


@pytest.mark.parametrize(
    "value",
    [
        delta(role="assistant", content=""),
        delta(role="assistant"),
        {"choices": [{"index": 0, "text": ""}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}},
        {"choices": ["x", None, {"delta": 3}]},
        {"choices": "content"},
        {"type": "response.created"},
        {"type": "message_start"},
        {},
        None,
    ],
)
def test_roles_and_announcements_are_no_first_token(value: dict[str, object] | None) -> None:
    assert not starts_output(value)


def test_errors_in_a_stream_are_recognised() -> None:
    assert is_error({"error": {"message": "m", "code": 500}})
    assert is_error({"type": "error", "error": {}})
    assert not is_error({"choices": [], "error": None})
    assert not is_error(None)


def test_the_ending_tells_usage_wherever_it_was_cut() -> None:
    event = b'data: {"choices":[],"usage":{"prompt_tokens":1234,"prompt_tokens_details":{"cached_tokens":1024}}}\n\n'
    for cut in range(len(event)):
        ending = ending_of_stream([event[:cut], event[cut:]])
        assert ending == Ending(Usage(1234, 1024))


def test_words_in_the_content_are_not_taken_for_structure() -> None:
    content = orjson.dumps(delta(content='data: {"error":{"code":1}} "prompt_tokens":5 "finish_reason":"abort"'))
    ending = ending_of_stream([b"data: " + content + b"\n\n"])
    assert ending.usage is None and ending.error_status is None


def test_a_stream_that_an_engine_gave_up_has_failed() -> None:
    """vLLM ends it under status 200, with an error event and [DONE], or with finish_reason abort."""
    ending = ending_of_stream([b'data: {"error":{"code":503}}\n\n', b"data: [DONE]\n\n"])
    assert ending.error_status == 503
    assert ending_of_stream([b'data: {"error":{"message":"m"}}\n\n']).error_status == 500
    assert ending_of_stream([b'data: {"error":{"mess']).error_status == 500
    assert ending_of_stream([b'data: {"choices":[{"finish_reason":"abort"}]}\n\n']).error_status == 500


def test_a_stream_that_ends_in_the_clients_own_error_says_so() -> None:
    error = b'data: {"error": {"message": "top_k must be -1", "type": "BadRequestError", "code": 400}}\n\n'
    assert ending_of_stream([error, b"data: [DONE]\n\n"]).error_status == 400


def test_usage_of_the_agents_apis_counts_the_whole_prompt() -> None:
    message = (
        b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":3,'
        b'"output_tokens":5,"cache_creation_input_tokens":32,"cache_read_input_tokens":64}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    response = (
        b'event: response.completed\ndata: {"response":{"status":"completed","usage":{"input_tokens":13,'
        b'"input_tokens_details":{"cached_tokens":4},"output_tokens":2}},"type":"response.completed"}\n\n'
    )
    assert ending_of_stream([message]) == Ending(Usage(99, 64, 5))
    assert ending_of_stream([response]) == Ending(Usage(13, 4, 2))


@pytest.mark.parametrize(
    "event",
    [
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"EngineCore"}}\n\n',
        b'event: response.failed\ndata: {"response":{"status":"failed"},"type":"response.failed"}\n\n',
        b'data: {"type": "response.failed"}\n\n',
    ],
)
def test_streams_of_the_agents_apis_that_end_in_an_error_have_failed(event: bytes) -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        pieces = [b"data: {}\n\n".replace(b"\n", end), event.replace(b"\n", end)]
        assert ending_of_stream(pieces).error_status == 500
    assert ending_of_stream([b'data: {"delta": "event: error"}\n\n']).error_status is None
