"""Where an answer ends in the bytes that come: no sockets."""

from __future__ import annotations

import pytest

from dualmap.router.answers.head import AnswerHead
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from tests.router.http.idle_transport import IdleTransport


class Sink:
    def __init__(self) -> None:
        self.wire = b""
        self.complete = False
        self.failure: InstanceFailure | None = None

    def head_received(self, head: AnswerHead) -> None: ...

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        self.wire += wire
        self.complete = complete

    def failed(self, failure: InstanceFailure) -> None:
        self.failure = failure


def feed(*pieces: bytes) -> Sink:
    sink, connection = Sink(), UpstreamConnection("http://instance")
    connection.connection_made(IdleTransport())
    connection.start([b""])
    connection.answer_to(sink)
    for piece in pieces:
        if sink.failure is None:
            connection.data_received(piece)
    return sink


def cuts(wire: bytes) -> list[list[bytes]]:
    """The wire whole, in two at every place, and byte by byte."""
    halves = [[wire[:at], wire[at:]] for at in range(1, len(wire))]
    return [[wire], *halves, [wire[at : at + 1] for at in range(len(wire))]]


ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n\n\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 204 X\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0;x\r\na: b\r\nc:\r\n\r\n",
]


@pytest.mark.parametrize("excess", [b"", b"\r\n", b"\r\n" * 1000, b"\n", b"\r"])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_line_ends_behind_an_answer_are_cut_and_its_connection_is_not_kept(answer: bytes, excess: bytes) -> None:
    for *pieces, last in cuts(answer):
        sink, connection = Sink(), UpstreamConnection("http://instance")
        connection.connection_made(IdleTransport())
        connection.start([b""])
        connection.answer_to(sink)
        for piece in [*pieces, last + excess]:
            connection.data_received(piece)
        assert sink.complete and sink.wire == answer.partition(b"\r\n\r\n")[2], [*pieces, last]
        assert connection.reusable is not bool(excess), [*pieces, last]


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("fields", [b"identity|chunked", b"chunked|identity", b"chunked|chunked", b"gzip, chunked"])
async def test_an_answer_of_doubtful_framing_is_refused(fields: bytes) -> None:
    lines = b"".join(b"transfer-encoding: %b\r\n" % field for field in fields.split(b"|"))
    sink = feed(b"HTTP/1.1 200 OK\r\nx: y\r\n%b\r\n2\r\n{}\r\n0\r\n\r\n" % lines)
    assert sink.failure is not None and sink.failure.kind is FailureKind.PROTOCOL
    assert not sink.wire


@pytest.mark.parametrize("before", [b"0\r\nx: ", b"1;"])
async def test_a_trailer_or_an_extension_that_never_ends_is_a_failure(before: bytes) -> None:
    sink = feed(CHUNKED + b"2\r\n{}\r\n" + before, *[b"y" * 5000] * 20)
    assert sink.failure is not None and sink.failure.kind is FailureKind.PROTOCOL
    assert len(sink.wire) < 80_000


async def test_trailers_that_never_end_are_a_failure() -> None:
    sink = feed(CHUNKED + b"2\r\n{}\r\n0\r\n", *[b"x: y\r\n" * 1000] * 20)
    assert sink.failure is not None and sink.failure.kind is FailureKind.PROTOCOL


async def test_a_long_stream_in_small_pieces_is_not_taken_for_a_trailer() -> None:
    sink = feed(CHUNKED, *[piece for _ in range(40_000) for piece in (b"1\r\n", b"x", b"\r\n")], b"0\r\n\r\n")
    assert sink.complete and sink.failure is None
