"""The request reader, byte by byte: no sockets."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from dualmap.router.errors import InvalidApiKeyError, RouterError
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.heads import fields_for_instance
from dualmap.router.http.request_reader import (
    DISCARDED_BODY_BYTES,
    MAX_PIPELINED_REQUESTS,
    ClientRequest,
    HeadCheck,
    RequestReader,
)

POST = b"POST /p HTTP/1.1\r\nhost: h\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"


def accept(request: ClientRequest) -> int:
    return 1000


def refuse(request: ClientRequest) -> int:
    raise InvalidApiKeyError("no key")


def reader(check_head: Any = accept) -> RequestReader:
    return RequestReader(check_head, max_header_bytes=2000, max_headers=10, bodies=BodyBudget(1 << 30))


def status_of(refusal: RouterError | None) -> int | None:
    return None if refusal is None else refusal.status


def test_a_request_is_read_the_same_however_it_is_cut() -> None:
    wire = POST + b"Content-Length: 5\r\nX-Y:  z \r\n\r\nhello" + b"GET /q?a=b HTTP/1.1\r\nhost: h\r\n\r\n"
    for size in (1, 2, 3, 7, 50, len(wire)):
        subject, got = reader(), []
        for start in range(0, len(wire), size):
            got += subject.feed(wire[start : start + size])
        first, second = got
        assert (first.method, first.path, first.body) == ("POST", "/p", b"hello")
        assert first.get(b"x-y") == b"z"
        assert (second.method, second.path, second.query, second.body) == ("GET", "/q", b"a=b", b"")
        assert not subject.reading and not subject.stopped


def test_a_chunked_body_is_joined_and_its_trailers_are_dropped() -> None:
    [request] = reader().feed(
        POST + b"Transfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"
    )
    assert request.body == b"hello!"
    assert request.get(b"trailer") is None


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        b"Content-Length: 2\r\nContent-Length: 2\r\n",
        b"Content-Length: 2, 2\r\n",
        b"Content-Length: -2\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"X : y\r\n",
        b"X: y\r\n folded\r\n",
        b"X: a\x00b\r\n",
        b"Host: twice\r\n",
    ],
)
def test_a_head_that_two_readers_could_understand_differently_is_refused(head: bytes) -> None:
    subject = reader()
    assert subject.feed(POST + head + b"\r\nab") == []
    assert subject.stopped
    assert status_of(subject.refusal) == 400


@pytest.mark.parametrize(
    "wire",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\n\r\n",
        b"GET / HTTP/3.7\r\n\r\n",
        b"POST / HTTP/2.0\r\nhost: h\r\ncontent-length: 0\r\n\r\n",
        b"POST / HTTP/0.9\r\nhost: h\r\n\r\n",
        b"POST /\r\nhost: h\r\n\r\n",
        b"POST / RTSP/1.0\r\nhost: h\r\ncontent-length: 0\r\n\r\n",
        b"GET / RTSP/1.1\r\nhost: h\r\n\r\n",
        b"GET / RTSP/1.1\r\nhost: h\r\nx: / HTTP/1.1\r\n\r\n",
        b"GET /  HTTP/1.1\r\nhost: h\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\nhost: h\n\n",
    ],
)
def test_what_is_not_http_is_refused_with_400(wire: bytes) -> None:
    for size in (1, 7, len(wire)):
        subject = reader()
        for start in range(0, len(wire), size):
            if not subject.stopped:
                assert subject.feed(wire[start : start + size]) == []
        assert subject.stopped and status_of(subject.refusal) == 400


def test_a_broken_chunk_size_is_refused() -> None:
    subject = reader()
    subject.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n")
    assert status_of(subject.refusal) == 400


def test_a_body_longer_than_announced_or_allowed_is_refused() -> None:
    announced = reader()
    announced.feed(POST + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n")
    assert status_of(announced.refusal) == 413
    chunked = reader()
    chunked.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(11):
        if not chunked.stopped:
            chunked.feed(b"64\r\n" + b"x" * 100 + b"\r\n")
    assert status_of(chunked.refusal) == 413


def test_too_many_fields_and_too_long_ones_are_refused() -> None:
    many = reader()
    many.feed(POST + b"".join(b"x-%d: 1\r\n" % n for n in range(10)) + b"\r\n")
    assert status_of(many.refusal) == 431
    long = reader()
    long.feed(POST + b"x: " + b"y" * 2000 + b"\r\n\r\n")
    assert status_of(long.refusal) == 431
    target = reader()
    target.feed(b"GET /" + b"y" * 2001)
    assert status_of(target.refusal) == 431


ENDLESS = b"y" * 3000


@pytest.mark.parametrize(
    ("wire", "advice"),
    [
        (b"GET /" + ENDLESS, "target is over 2000 bytes; shorten it"),
        (POST + b"x: " + ENDLESS, "head is over 2000 bytes; shorten it"),
        (
            POST + b"x: " + ENDLESS + b"\r\n\r\n",
            "head is over 2000 bytes; shorten it",
        ),
        (POST + 20 * b"x: y\r\n" + b"\r\n", "over 10 header fields; send fewer"),
        (CHAT + b"expect: 100-continue\r\ncontent-length: 1001\r\n\r\n", "or raise router.max_body_bytes"),
        (CHAT + b"transfer-encoding: chunked\r\n\r\nbb8\r\n" + ENDLESS, "or raise router.max_body_bytes"),
        (
            POST.replace(b"/p", b"/ui") + b"transfer-encoding: chunked\r\n\r\nbb8\r\n" + ENDLESS,
            "over 1000 bytes; shorten it",
        ),
    ],
)
def test_a_limit_is_named_with_what_to_do_about_it(wire: bytes, advice: str) -> None:
    subject = reader()
    subject.feed(wire)
    assert subject.refusal is not None and subject.refusal.message.endswith(advice)


def test_a_field_that_never_ends_is_refused_while_it_grows() -> None:
    subject, fed = reader(), 0
    subject.feed(POST + b"x: ")
    while not subject.stopped:
        subject.feed(b"y" * 100)
        fed += 100
        assert fed < 4000
    assert status_of(subject.refusal) == 431


@pytest.mark.parametrize(("check_head", "status"), [(accept, 431), (refuse, 401)])
@pytest.mark.parametrize("before", [b"", b"GET /before HTTP/1.1\r\nhost: h\r\n\r\n"])
def test_a_trailer_that_never_ends_is_refused_while_it_grows(check_head: HeadCheck, status: int, before: bytes) -> None:
    subject, fed = reader(check_head), 0
    subject.feed(before + POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx: ")
    while not subject.stopped:
        assert subject.feed(b"y" * 100) == []
        fed += 100
        assert fed < 4000
    assert status_of(subject.refusal) == status


def test_chunk_extensions_are_bounded_in_all() -> None:
    subject = reader()
    subject.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(3):
        assert not subject.stopped
        subject.feed(b"1;" + b"x" * 900 + b"\r\n!\r\n")
    assert status_of(subject.refusal) == 431


def test_chunks_of_one_byte_do_not_count_as_extensions() -> None:
    subject = reader()
    subject.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(900):
        assert subject.feed(b"0001\r\n!\r\n") == []
    [request] = subject.feed(b"0\r\n\r\n")
    assert len(request.body) == 900


def test_a_body_in_many_small_chunks_of_many_pieces_does_not_count_as_trailer() -> None:
    subject = reader()
    subject.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(900):
        for piece in (b"1\r\n", b"z", b"\r\n"):
            assert subject.feed(piece) == []
    [request] = subject.feed(b"0\r\n\r\n")
    assert len(request.body) == 900 and not subject.stopped


def test_a_body_in_tiny_chunks_takes_no_more_memory_than_its_bytes() -> None:
    subject = RequestReader(lambda request: 1 << 20, max_header_bytes=2000, max_headers=10, bodies=BodyBudget(1 << 30))
    subject.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    chunks = b"2\r\nab\r\n" * 1000
    tracemalloc.start()
    try:
        for _ in range(100):
            subject.feed(chunks)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 2 * 200_000
    [request] = subject.feed(b"0\r\n\r\n")
    assert request.body == b"ab" * 100_000


def test_a_long_body_in_many_pieces_does_not_count_as_head() -> None:
    subject = RequestReader(lambda request: 1 << 20, max_header_bytes=2000, max_headers=10, bodies=BodyBudget(1 << 30))
    subject.feed(POST + b"Content-Length: 500000\r\n\r\n")
    got = []
    for _ in range(500):
        got += subject.feed(b"z" * 1000)
    assert [len(request.body) for request in got] == [500_000]


def test_a_refused_request_with_a_short_body_keeps_the_connection_in_step() -> None:
    subject = reader(refuse)
    first, second = subject.feed(2 * (POST + b"Content-Length: 5\r\n\r\nhello"))
    assert status_of(first.refusal) == status_of(second.refusal) == 401
    assert first.body == b""
    assert not subject.stopped


def test_a_refused_request_with_a_long_body_stops_reading_at_once() -> None:
    subject = reader(refuse)
    assert subject.feed(POST + b"Content-Length: %d\r\n\r\n" % (DISCARDED_BODY_BYTES + 1)) == []
    assert subject.stopped and status_of(subject.refusal) == 401


def test_a_refused_chunked_body_is_dropped_up_to_a_bound() -> None:
    subject = reader(refuse)
    subject.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    fed = 0
    while not subject.stopped:
        subject.feed(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        fed += 0x2000
    assert fed <= DISCARDED_BODY_BYTES + 0x2000
    assert status_of(subject.refusal) == 401


def test_a_client_that_asks_to_continue_is_heard_until_its_body_comes() -> None:
    subject = reader()
    subject.feed(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert subject.expects_continue
    [request] = subject.feed(b"ab")
    assert request.body == b"ab" and not subject.expects_continue


def test_a_client_of_http_10_is_not_told_to_continue() -> None:
    subject = reader()
    subject.feed(b"POST /p HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert subject.reading and not subject.expects_continue


def test_requests_ahead_of_their_answers_are_bounded() -> None:
    subject = reader()
    got = subject.feed((MAX_PIPELINED_REQUESTS + 5) * b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n")
    assert len(got) == MAX_PIPELINED_REQUESTS
    assert subject.stopped and subject.refusal is None


def test_nothing_behind_a_last_request_is_read() -> None:
    subject = reader()
    wire = b"GET /x HTTP/1.1\r\nhost: h\r\nConnection: close\r\n\r\n"
    [request] = subject.feed(wire + wire)
    assert not request.keep_alive
    assert subject.stopped and subject.refusal is None


def test_good_requests_before_a_broken_one_are_kept() -> None:
    subject = reader()
    [request] = subject.feed(b"GET /x HTTP/1.1\r\nhost: h\r\n\r\nrubbish\r\n\r\n")
    assert request.path == "/x"
    assert subject.stopped and status_of(subject.refusal) == 400


@pytest.mark.parametrize("cut", [1, 40, 1000])
def test_an_offered_upgrade_is_ignored_and_the_body_still_read(cut: int) -> None:
    """HTTP clients that prefer HTTP/2 (Java's, curl --http2) offer h2c on every first request."""
    wire = (
        b"POST /p?q HTTP/1.1\r\nhost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nContent-Length: 5\r\n\r\nhello" + b"GET /next HTTP/1.1\r\nhost: h\r\n\r\n"
    )
    subject, got = reader(), []
    for start in range(0, len(wire), cut):
        got += subject.feed(wire[start : start + cut])
    assert [(request.method, request.path, request.query, request.body) for request in got] == [
        ("POST", "/p", b"q", b"hello"),
        ("GET", "/next", b"", b""),
    ]
    assert got[0].keep_alive and got[0].get(b"upgrade") is None


def test_what_an_offered_upgrade_nominates_beside_itself_still_ends_at_this_hop() -> None:
    [request] = reader().feed(
        b"POST /p HTTP/1.1\r\nhost: h\r\nConnection: X-Own, upgrade\r\nUpgrade: h2c\r\nConnection: HTTP2-Settings,,\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nX-Own: 1\r\nX-Kept: 2\r\nContent-Length: 0\r\n\r\n"
    )
    assert request.keep_alive
    assert fields_for_instance(request.fields, keep_credentials=True) == b"x-kept: 2\r\nvia: 1.1 dualmap\r\n"
    [request] = reader().feed(b"GET /p HTTP/1.1\r\nhost: h\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert not request.keep_alive


@pytest.mark.parametrize("host", [b"", b"host: h\r\n"])
def test_an_upgrade_that_http_10_offers_leaves_it_http_10(host: bytes) -> None:
    head = b"POST /p HTTP/1.0\r\n%bConnection: Upgrade\r\nUpgrade: foo\r\nContent-Length: 5\r\n\r\n" % host
    [request] = reader().feed(head + b"hello")
    assert request.http_10 and not request.keep_alive and request.body == b"hello"


def test_connect_is_no_upgrade_and_nothing_follows_it() -> None:
    subject = reader(refuse)
    [request] = subject.feed(b"CONNECT h:443 HTTP/1.1\r\nhost: h\r\n\r\n\x16\x03\x01")
    assert request.method == "CONNECT" and request.refusal is not None
    assert subject.stopped


def test_a_full_url_as_target_is_read_as_its_path() -> None:
    [request] = reader().feed(b"GET http://other/x?y=z HTTP/1.1\r\nhost: h\r\n\r\n")
    assert (request.path, request.query) == ("/x", b"y=z")


def test_http_10_never_keeps_the_connection() -> None:
    [request] = reader().feed(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert request.http_10 and not request.keep_alive
