"""Heads that are read in C are read as by the parser of HTTP, and nothing beyond their bytes is looked at."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dualmap.router.http.plain_heads import NATIVE, lines_in_python, read_request, without_in_python
from dualmap.router.http.request_reader import MAX_HEADER_BYTES, MAX_HEADERS
from tests.router.http.near_heads import compared
from tests.support.sanitized import ROOT, run_sanitized, sanitized

native = pytest.mark.skipif(NATIVE is None, reason="the native reader of heads is not built")

SDK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\n"
    b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
    b"User-Agent: OpenAI/Python 2.8.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.8.0\r\n"
    b"Authorization: Bearer sk-1\r\nContent-Length: 2\r\n\r\n{}"
)
UVICORN = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 28 Nov 2026 18:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: 2\r\n"
    b"content-type: application/json\r\n\r\n{}"
)


@native
def test_heads_of_a_usual_client_and_of_an_engine_are_plain() -> None:
    target, fields, index, start, body_bytes = NATIVE.read_request(SDK, MAX_HEADER_BYTES, MAX_HEADERS)
    assert (target, SDK[start:], body_bytes) == (b"/v1/chat/completions", b"{}", 2)
    assert index == dict(fields) and index[b"x-stainless-lang"] == b"python"

    status, fields, index, start, body_bytes = NATIVE.read_answer(UVICORN, MAX_HEADER_BYTES)
    assert (status, UVICORN[start:], body_bytes, index) == (200, b"{}", 2, dict(fields)) and len(fields) == 4
    stream = UVICORN.replace(b"content-length: 2", b"transfer-encoding: chunked")
    assert NATIVE.read_answer(stream, MAX_HEADER_BYTES)[4] == -1


@native
def test_a_head_is_plain_up_to_its_limits() -> None:
    start, fields = SDK.index(b"\r\n\r\n") + 4, SDK.count(b": ")
    assert NATIVE.read_request(SDK, start, fields) is not None
    assert NATIVE.read_request(SDK, start - 1, fields) is None
    assert NATIVE.read_request(SDK, start, fields - 1) is None
    for end in range(start):
        assert NATIVE.read_request(SDK[:end], MAX_HEADER_BYTES, MAX_HEADERS) is None
    for end in range(UVICORN.index(b"\r\n\r\n") + 4):
        assert NATIVE.read_answer(UVICORN[:end], MAX_HEADER_BYTES) is None


@native
def test_of_fields_of_a_name_a_request_has_the_first_and_an_answer_the_last() -> None:
    request = NATIVE.read_request(SDK.replace(b"Accept:", b"x-a: 1\r\nX-A: 2\r\nAccept:"), 1000, 20)
    answer = NATIVE.read_answer(UVICORN.replace(b"server", b"x-a: 1\r\nX-A: 2\r\nserver"), 1000)
    assert (request[2][b"x-a"], answer[2][b"x-a"]) == (b"1", b"2")
    assert [value for name, value in request[1] if name == b"x-a"] == [b"1", b"2"]


@native
@pytest.mark.parametrize("seed", range(3))
def test_messages_that_are_nearly_right_are_read_as_by_the_parser(seed: int) -> None:
    requests, answers = compared(Random(seed), 700, NATIVE.read_request, NATIVE.read_answer)

    assert requests > 120 and answers > 120, "heads are plain"


@native
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("read_request", (b"x", 1)),
        ("read_request", ("x", 1, 1)),
        ("read_request", (b"x", "1", 1)),
        ("read_answer", (bytearray(b"x"), 1)),
        ("without", ((), frozenset())),
        ("without", ([b"x"], frozenset())),
        ("without", ([(b"x", b"y", b"z")], frozenset())),
        ("lines", (b"", [("x", "y")], b"")),
        ("lines", (b"", [(b"x", b"y")], "")),
    ],
)
def test_wrong_arguments_are_errors(name: str, wrong: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        getattr(NATIVE, name)(*wrong)


def test_fields_are_written_and_left_out_by_name() -> None:
    fields = [(b"a", b"1"), (b"b", b""), (b"a", b"2")]
    assert lines_in_python(b"x\r\n", fields, b"\r\n") == b"x\r\na: 1\r\nb: \r\na: 2\r\n\r\n"
    assert lines_in_python(b"x", [], b"y") == b"xy"
    assert without_in_python(fields, frozenset([b"a"])) == [(b"b", b"")]


def test_without_a_build_every_head_is_left_to_the_parser() -> None:
    assert (read_request(SDK, MAX_HEADER_BYTES, MAX_HEADERS) is None) is (NATIVE is None)


def test_the_native_reader_looks_at_nothing_beyond_the_head(tmp_path: Path) -> None:
    made = sanitized(ROOT / "dualmap/router/http/plain_heads.c", tmp_path)

    assert run_sanitized("tests.router.http.fuzz_plain_heads", str(made), "1500") == "1500\n"
