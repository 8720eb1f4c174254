"""Where an answer ends in the bytes that come: no sockets."""

from __future__ import annotations

import pytest

from router.http.upstream import AnswerHead, UpstreamConnection
from router.outcome import InstanceFailure


class Wire:
    """A transport that is always there."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, data: object) -> None: ...

    def abort(self) -> None: ...


class Sink:
    def __init__(self) -> None:
        self.wire = b""
        self.complete = False

    def head_received(self, head: AnswerHead) -> None: ...

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        self.wire += wire
        self.complete = complete

    def failed(self, failure: InstanceFailure) -> None:
        raise AssertionError(failure)


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
        connection.connection_made(Wire())  # type: ignore[arg-type]
        connection.start(sink, b"", b"")
        for piece in [*pieces, last + excess]:
            connection.data_received(piece)
        assert sink.complete and sink.wire == answer.partition(b"\r\n\r\n")[2], [*pieces, last]
        assert connection.reusable is not bool(excess), [*pieces, last]
