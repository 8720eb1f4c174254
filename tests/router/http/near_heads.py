"""Messages that are nearly right, and what the readers make of them with plain heads and by the parser alone."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from random import Random
from typing import Any, Final

from dualmap.router.answers.head import AnswerHead
from dualmap.router.errors import InvalidApiKeyError
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.plain_heads import ReadAnswer, ReadRequest
from dualmap.router.http.request_reader import ClientRequest, RequestReader
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.scheduling.request.outcome import InstanceFailure
from tests.router.http.idle_transport import IdleTransport

REQUEST_LINES: Final = (
    *[b"POST /v1/chat/completions HTTP/1.1"] * 40, b"POST /v1/messages HTTP/1.1", b"POST /v1/embeddings HTTP/1.0",
    b"POST  /v1/completions HTTP/1.1", b"POST /v1/completions  HTTP/1.1", b"POST /v1/completions?a=b HTTP/1.1",
    b"POST /v1/completions HTTP/1.2", b"GET /v1/models HTTP/1.1", b"post /v1/completions HTTP/1.1",
    b"POST /v1/%63ompletions HTTP/1.1", b"POST http://h/v1/completions HTTP/1.1", b"\r\nPOST /v1/completions HTTP/1.1",
    b"POST /v1/unknown HTTP/1.1", b"POST /v1/completions HTTP/1.1 ", b"POST /v1/completions",
    b"POST /v1/completions RTSP/1.1",
)  # fmt: skip
STATUS_LINES: Final = (
    *[b"HTTP/1.1 200 OK"] * 40, b"HTTP/1.1 200 ", b"HTTP/1.1 200", b"HTTP/1.1 204 X", b"HTTP/1.1 304 X",
    b"HTTP/1.1 503 Not\tnow", b"HTTP/1.0 200 OK", b"HTTP/1.1 101 X", b"HTTP/1.1 2000 X", b"HTTP/1.1 999 X",
    b"HTTP/1.1 099 X", b"HTTP/1.1  200 OK", b"HTTP/1.1 200 \xe9", b"HTTP/1.1 20x OK", b"\r\nHTTP/1.1 200 OK",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK", b"ICY 200 OK",
)  # fmt: skip
FIELDS: Final = (
    b"Content-Type: application/json", b"X-Stainless-Lang: python", b"x-a: b", b"x-a: c", b"Accept: */*",
    b"Authorization: Bearer sk-1", b"authorization: Bearer sk-2", b"Connection: keep-alive", b"User-Agent: u\xe9 (x)",
)  # fmt: skip
ODD_FIELDS: Final = (
    b"Connection: Keep-Alive", b"Connection: close", b"connection: x-a", b"Connection: upgrade", b"Upgrade: h2c",
    b"Transfer-Encoding: chunked", b"transfer-encoding: gzip", b"Content-Length: 3", b"content-length: 3 ",
    b"Content-Length: +3", b"Content-Length:", b"Content-Length: 99999999999999999999", b"Content-Length: 0x3",
    b"Expect: 100-continue", b"Proxy-Connection: close", b"Keep-Alive: timeout=5", b"x:", b"x: ", b"x : y", b" x: y",
    b": y", b"x", b"x: a\x00b", b"x: a\rb", b"x: a\nb", b"x: \x7f", b"x\xe9: y", b"x: \t y\t", b"x:\ty", b"Host: g",
    b"host:", b"x: " + b"y" * 700, b"x" * 70 + b": y", b"x(y): z", b"!#$%&'*+-.^_`|~: z", b"Trailer: x",
    b"User-Agent: (x) ",
)  # fmt: skip


LAST_CHUNKS: Final = (
    *[b"0\r\n\r\n"] * 4, b"0\r\nx: y\r\n\r\n", b"0\r\n\r\n\r\n", b"0;x\r\n\r\n", b"z\r\n",
    b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
)  # fmt: skip


def message(random: Random, first_lines: tuple[bytes, ...]) -> bytes:
    body = random.choice((b"", b"{}", b"abc", b"\r\n", b"x" * random.choice((10, 300, 5000))))
    fields = random.sample(FIELDS, random.randint(0, 6))
    if random.random() < 0.3 and first_lines is STATUS_LINES:
        fields.append(b"Transfer-Encoding: chunked")
        sizes = random.choices((0, 1, 3, 700), k=random.randint(0, 3))
        body = b"".join([b"%x\r\n%b\r\n" % (size, b"y" * size) for size in sizes if size])
        body += random.choice(
            (b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\n\r\n\r\n", b"0;x\r\n\r\n", b"z\r\n")
        )
    elif random.random() < 0.9:
        fields.append(b"Content-Length: %d" % (len(body) + random.choice((0, 0, 0, 0, 0, 0, 1, -1))))
    if random.random() < 0.9:
        fields.append(b"host: h")
    if random.random() < 0.25:
        fields.append(random.choice(ODD_FIELDS))
    random.shuffle(fields)
    ends = b"\r\n" if random.random() < 0.95 else random.choice((b"\n", b"\r", b"\r\r\n"))
    wire = ends.join([random.choice(first_lines), *fields, b"", b""])
    if random.random() < 0.1:
        at = random.randrange(len(wire))
        wire = wire[:at] + random.choice((b"", b"\x00", b"\r", b"\n", b" ", b":", b"\xff")) + wire[at + 1 :]
    return wire + body


def pieces_of(random: Random, wire: bytes) -> list[bytes]:
    if random.random() < 0.6:
        return [wire]
    places = sorted({0, len(wire), *[random.randrange(len(wire) + 1) for _ in range(random.choice((1, 3)))]})
    return [wire[start:stop] for start, stop in pairwise(places)]


def check_head(request: ClientRequest) -> int:
    if request.get(b"authorization") == b"Bearer sk-2":
        raise InvalidApiKeyError("no such key")
    return 4000


def requests_in(pieces: list[bytes], read_plain: ReadRequest) -> list[Any]:
    """What a reader makes of a client's bytes."""
    bodies = BodyBudget(9000)
    reader = RequestReader(check_head, bodies=bodies, max_header_bytes=1000, max_headers=8, read_plain=read_plain)
    found: list[Any] = []
    for piece in pieces:
        if not piece or reader.stopped:
            continue
        for each in reader.feed(piece):
            names = {name for name, _ in each.fields}
            found.append((
                each.method, each.path, each.query, each.fields, each.http_10, each.keep_alive, each.body,
                str(each.refusal), each.counted_for, each.all_differ, {name: each.get(name) for name in names},
            ))  # fmt: skip
        found.append((reader.stopped, str(reader.refusal), reader.reading, reader.expects_continue, reader.path))
        found.append(bodies.held_bytes)
    return found


class _Sink:
    def __init__(self) -> None:
        self.found: list[Any] = []
        self.passed: list[Any] = [b"", b"", False]

    def head_received(self, head: AnswerHead) -> None:
        self.found.append((head.status, head.fields, head.framing, head.index))

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        before, bare, _ = self.passed
        self.passed = [before + wire, bare + b"".join(pieces), complete]

    def failed(self, failure: InstanceFailure) -> None:
        self.found.append((failure.kind, failure.detail))

    def probe(self) -> None: ...

    def cut_off(self, error: object) -> None: ...


def answer_in(pieces: list[bytes], read_plain: ReadAnswer) -> list[Any]:
    """What a connection makes of an instance's bytes."""
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    try:
        return loop.run_until_complete(_answer_in(pieces, read_plain))
    finally:
        loop.close()


async def _answer_in(pieces: list[bytes], read_plain: ReadAnswer) -> list[Any]:
    connection, sink = UpstreamConnection("http://instance", read_plain=read_plain), _Sink()
    connection.connection_made(IdleTransport())
    connection.start([b""])
    connection.answer_to(sink)
    for piece in filter(None, pieces):
        connection.data_received(piece)
        if connection.complete:
            break
    return [*sink.found, sink.passed, connection.complete, connection.reusable, connection.silent]


def compared(random: Random, count: int, read_request: ReadRequest, read_answer: ReadAnswer) -> tuple[int, int]:
    """Compare what is made of so many messages of each kind, with plain heads and by the parser alone. Returns how many
    heads were plain."""
    plain = [0, 0]

    def counted(kind: int, found: Any) -> Any:
        plain[kind] += found is not None
        return found

    for number in range(count):
        wire = b"".join([message(random, REQUEST_LINES) for _ in range(random.choice((1, 1, 2, 3)))])
        pieces = pieces_of(random, wire)
        expected = requests_in(pieces, lambda *_: None)
        assert requests_in(pieces, lambda *given: counted(0, read_request(*given))) == expected, (number, pieces)
        pieces = pieces_of(random, message(random, STATUS_LINES))
        expected = answer_in(pieces, lambda *_: None)
        assert answer_in(pieces, lambda *given: counted(1, read_answer(*given))) == expected, (number, pieces)
    return plain[0], plain[1]
