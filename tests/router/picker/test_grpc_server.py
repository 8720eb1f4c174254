"""The picker's gRPC server: by a client that others wrote, and by frames as a test writes them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from hpack import Decoder, Encoder

from dualmap.router.picker import grpc_server
from dualmap.router.picker.grpc_server import (
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    PREFACE,
    GrpcServer,
    GrpcStream,
    LeftError,
    Method,
    Status,
    StatusError,
)
from tests.router.http.kit import eventually

LONGEST = 1 << 20
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 1, 1, 4, 8, 32


class Served:
    """A server of some methods, and what its calls saw."""

    def __init__(self) -> None:
        self.left = 0
        self.peers: set[str] = set()
        methods = {
            "Echo": self.echo,
            "Wait": self.wait,
            "Fail": self.fail,
            "Break": self.break_down,
            "Flood": self.flood,
        }
        self.server = GrpcServer(
            {f"/test/{name}": Method(serve, bytes) for name, serve in methods.items()}, max_message_bytes=LONGEST
        )
        self.port = 0

    async def echo(self, stream: GrpcStream) -> None:
        self.peers.add(stream.peer)
        while (message := await stream.read()) is not None:
            await stream.write(message)

    async def wait(self, stream: GrpcStream) -> None:
        await stream.read()
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1

    async def fail(self, stream: GrpcStream) -> None:
        raise StatusError(Status.NOT_FOUND, "no such thing: é%")

    async def break_down(self, stream: GrpcStream) -> None:
        raise ValueError

    async def flood(self, stream: GrpcStream) -> None:
        try:
            while True:
                await stream.write(b"x" * 1000)
        except (LeftError, asyncio.CancelledError):
            self.left += 1
            raise


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    made.port = await made.server.listen("127.0.0.1", 0)
    await made.server.start()
    yield made
    await made.server.close()
    assert not made.server.connections


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[Any]:
    own = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", own) as channel:
        yield channel


def call(channel: Any, method: str) -> Any:
    return channel.stream_stream(f"/test/{method}")()


# by grpc's own client ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 100, MAX_FRAME_BYTES, 70_000, LONGEST])
async def test_messages_of_any_length_come_and_go_whole(channel: Any, size: int) -> None:
    stream = call(channel, "Echo")
    for number in range(5):
        message = bytes([number]) * size
        await stream.write(message)
        assert await stream.read() == message
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_many_streams_share_a_connection(served: Served, channel: Any) -> None:
    async def one(number: int) -> None:
        stream = call(channel, "Echo")
        for _ in range(5):
            await stream.write(b"%d" % number)
            assert await stream.read() == b"%d" % number
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

    await asyncio.gather(*map(one, range(200)))
    assert len(served.server.connections) == 1
    assert {peer.rpartition(":")[0] for peer in served.peers} == {"ipv4:127.0.0.1"}
    await eventually(lambda: served.server.streams == 0)


@pytest.mark.parametrize(
    ("method", "code", "details"),
    [
        ("Fail", grpc.StatusCode.NOT_FOUND, "no such thing: é%"),
        ("Break", grpc.StatusCode.INTERNAL, "see the log of the picker"),
        ("Nothing", grpc.StatusCode.UNIMPLEMENTED, "there is no such method here"),
    ],
)
async def test_a_call_that_fails_ends_with_its_status(
    channel: Any, method: str, code: grpc.StatusCode, details: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, method).read()
    assert (failed.value.code(), failed.value.details()) == (code, details)


async def test_a_message_that_is_too_long_ends_its_stream_and_no_other(channel: Any) -> None:
    other, stream = call(channel, "Echo"), call(channel, "Echo")
    await other.write(b"a")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stream.write(b"x" * (LONGEST + 1))
        await stream.read()
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await other.read() == b"a"
    other.cancel()


async def test_a_compressed_message_is_refused(served: Served) -> None:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{served.port}", compression=grpc.Compression.Gzip)
    async with channel:
        stream = call(channel, "Echo")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stream.write(b"a" * 1000)
            await stream.read()
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_that_leaves_ends_the_call_whatever_it_does(served: Served, channel: Any) -> None:
    for method in ("Wait", "Flood"):
        stream = call(channel, method)
        await stream.write(b"a")
        await eventually(lambda: served.server.streams == 1)
        stream.cancel()
    await eventually(lambda: served.left == 2)
    await eventually(lambda: served.server.streams == 0)


async def test_a_server_that_drains_takes_no_stream_and_waits_for_those_that_are_open(
    served: Served, channel: Any
) -> None:
    stream = call(channel, "Echo")
    await stream.write(b"a")
    await stream.read()
    drained = asyncio.create_task(served.server.drain())
    await stream.write(b"b")
    assert await stream.read() == b"b"
    late = call(channel, "Echo")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await late.read()
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not drained.done()
    await stream.done_writing()
    await drained


async def test_what_does_not_end_is_cut_off(served: Served, channel: Any) -> None:
    stream = call(channel, "Wait")
    await stream.write(b"a")
    await eventually(lambda: served.server.streams == 1)
    await served.server.close()
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await stream.read()
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert served.left == 1


# by frames -------------------------------------------------------------------------------------------------------
def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream_id) + payload


def message(content: bytes) -> bytes:
    return struct.pack(">BI", 0, len(content)) + content


class Peer:
    """A client that a test writes frame by frame. It keeps a table of header fields until it hears of the settings."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = Encoder(), Decoder()

    def block(self, method: str = "Echo", **more: str) -> bytes:
        fields = {":method": "POST", ":scheme": "http", ":path": f"/test/{method}", "te": "trailers", **more}
        return bytes(self.encoder.encode(list(fields.items())))

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def next(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """The next frame of one of these kinds: kind, flags, stream and payload."""
        while True:
            async with asyncio.timeout(10):
                first, flags, stream_id = struct.unpack(">IBI", await self.reader.readexactly(9))
                payload = await self.reader.readexactly(first >> 8)
            if first & 0xFF in kinds:
                return first & 0xFF, flags, stream_id, payload

    async def echoed(self, stream_id: int) -> bytes:
        """The next message on a stream."""
        while True:
            _, _, found, payload = await self.next(DATA)
            if found == stream_id:
                return payload[5:]

    async def ended_with(self) -> int:
        """The error of a connection that the server ends."""
        *_, payload = await self.next(GOAWAY)
        while await self.reader.read(1 << 16):
            pass
        return int(struct.unpack(">II", payload)[1])


@pytest.fixture
async def peer(served: Served) -> AsyncIterator[Peer]:
    made = Peer(*await asyncio.open_connection("127.0.0.1", served.port))
    made.send(PREFACE, frame(SETTINGS, 0, 0))
    yield made
    made.writer.close()


async def test_frames_that_come_byte_by_byte_are_read_as_whole_ones(peer: Peer) -> None:
    for each in frame(HEADERS, END_HEADERS, 1, peer.block()) + frame(DATA, 0, 1, message(b"ab") + message(b"c")):
        peer.send(bytes([each]))
        await peer.writer.drain()
        await asyncio.sleep(0)
    assert await peer.echoed(1) == b"ab"
    assert await peer.echoed(1) == b"c"


async def test_a_message_in_pieces_and_pieces_of_several_messages(peer: Peer) -> None:
    whole = message(b"first") + message(b"") + message(b"second")
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()))
    for at in range(0, len(whole), 4):
        peer.send(frame(DATA, 0, 1, whole[at : at + 4]))
    assert [await peer.echoed(1) for _ in range(3)] == [b"first", b"", b"second"]


async def test_padding_priorities_and_continued_header_blocks_are_understood(peer: Peer) -> None:
    block = peer.block()
    peer.send(
        frame(HEADERS, PADDED | HAS_PRIORITY, 1, b"\x02" + b"\0\0\0\0\x10" + block[:5] + b"\0\0"),
        frame(CONTINUATION, 0, 1, block[5:9]),
        frame(CONTINUATION, END_HEADERS, 1, block[9:]),
        frame(DATA, PADDED, 1, b"\x03" + message(b"a") + b"\0\0\0"),
    )
    assert await peer.echoed(1) == b"a"


async def test_header_fields_are_read_by_the_table_and_without_one(peer: Peer) -> None:
    peer.send(*(frame(HEADERS, END_HEADERS, number, peer.block()) for number in (1, 3)))
    peer.send(*(frame(DATA, 0, number, message(b"%d" % number)) for number in (1, 3)))
    assert {await peer.echoed(1), await peer.echoed(3)} == {b"1", b"3"}
    peer.encoder.header_table_size = 0  # as the server's settings ask for
    peer.send(frame(SETTINGS, ACK, 0))
    for number in (5, 7, 9):
        peer.send(frame(HEADERS, END_HEADERS, number, peer.block()), frame(DATA, 0, number, message(b"%d" % number)))
        assert await peer.echoed(number) == b"%d" % number


async def test_a_ping_and_settings_are_acknowledged_and_unknown_frames_are_not_minded(peer: Peer) -> None:
    peer.send(frame(0xEE, 0, 0, b"new"), frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, b"12345678"))
    assert await peer.next(SETTINGS) != (SETTINGS, ACK, 0, b"")
    assert await peer.next(SETTINGS) == (SETTINGS, ACK, 0, b"")
    assert await peer.next(PING) == (PING, ACK, 0, b"12345678")


async def test_no_more_is_sent_than_the_windows_of_the_peer_allow(peer: Peer, served: Served) -> None:
    peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100)), frame(HEADERS, END_HEADERS, 1, peer.block()))
    peer.send(frame(DATA, 0, 1, message(b"x" * 300)))
    assert len((await peer.next(DATA))[3]) == 100
    peer.send(frame(PING, 0, 0, b"12345678"))
    assert (await peer.next(PING, DATA))[0] == PING, "it waits"
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 150)))
    assert len((await peer.next(DATA))[3]) == 150
    peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1000)))
    assert len((await peer.next(DATA))[3]) == 305 - 250
    peer.send(frame(HEADERS, END_HEADERS, 3, peer.block("Flood")))
    sent = 305
    while sent < 65_535:  # the window of the connection
        sent += len((await peer.next(DATA))[3])
        peer.send(frame(WINDOW_UPDATE, 0, 3, struct.pack(">I", 1000)))
    assert sent == 65_535
    peer.send(frame(RST_STREAM, 0, 3, struct.pack(">I", 8)))
    await eventually(lambda: served.left == 1)


async def test_the_peer_gets_its_windows_back_as_messages_are_read(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()), frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1 << 30)))
    _, _, stream_id, _ = await peer.next(WINDOW_UPDATE)
    assert stream_id == 0, "the connection's window is widened at its begin"
    piece = MAX_FRAME_BYTES - 5
    sent = 0
    while True:
        peer.send(frame(DATA, 0, 1, message(b"x" * piece)))
        sent += MAX_FRAME_BYTES
        await peer.writer.drain()
        kind, _, stream_id, payload = await peer.next(WINDOW_UPDATE, DATA)
        if kind == WINDOW_UPDATE:
            break
    assert stream_id == 1
    (given,) = struct.unpack(">I", payload)
    assert LONGEST // 2 <= given <= sent


async def test_a_peer_that_sends_more_than_its_window_allows_is_left(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("Wait")))  # which reads one message alone
    piece = frame(DATA, 0, 1, message(b"x" * (MAX_FRAME_BYTES - 5)))
    peer.send(*[piece] * (2 * (LONGEST // MAX_FRAME_BYTES + 1) + 1))
    assert await peer.ended_with() == 3


GONE_WRONG = {
    "no HTTP/2": (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", 1),
    "a frame that is too long": (struct.pack(">IBI", (MAX_FRAME_BYTES + 1) << 8, 0, 1), 6),
    "data before the headers": (frame(DATA, 0, 1, b"a"), 1),
    "the number of a server's stream": (frame(HEADERS, END_HEADERS, 2, b"\x82"), 1),
    "an interrupted header block": (frame(HEADERS, 0, 1, b"\x82") + frame(PING, 0, 0, b"12345678"), 1),
    "a continuation of nothing": (frame(CONTINUATION, END_HEADERS, 1, b"\x82"), 1),
    "header fields that cannot be read": (frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"), 9),
    "an index that no table has": (frame(HEADERS, END_HEADERS, 1, b"\xfe"), 9),
    "an endless header block": (
        frame(HEADERS, 0, 1, b"\x82") + frame(CONTINUATION, 0, 1, b"\x82" * 16_000) * (MAX_HEADER_BYTES // 16_000 + 1),
        11,
    ),
    "more padding than bytes": (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09\x82"), 1),
    "a window that overflows": (frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", (1 << 31) - 1)), 3),
    "a window update of three bytes": (frame(WINDOW_UPDATE, 0, 0, b"abc"), 6),
    "settings that are cut": (frame(SETTINGS, 0, 0, b"abcd"), 6),
    "a push": (frame(5, END_HEADERS, 1, b"\0\0\0\2\x82"), 1),
}


@pytest.mark.parametrize("wrong", GONE_WRONG)
async def test_a_connection_that_breaks_the_rules_ends_with_the_reason_and_no_other_does(
    served: Served, peer: Peer, wrong: str
) -> None:
    sent, error = GONE_WRONG[wrong]
    bad = Peer(*await asyncio.open_connection("127.0.0.1", served.port))
    bad.send(b"" if wrong == "no HTTP/2" else PREFACE, sent)
    assert await bad.ended_with() == error
    bad.writer.close()
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block()), frame(DATA, 0, 1, message(b"a")))
    assert await peer.echoed(1) == b"a"


async def test_a_stream_whose_end_crosses_the_servers_own_is_not_minded(peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("Fail")))
    assert (await peer.next(RST_STREAM))[2] == 1
    peer.send(frame(DATA, END_STREAM, 1, message(b"late")), frame(HEADERS, END_HEADERS | END_STREAM, 1, peer.block()))
    peer.send(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)), frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 9)))
    peer.send(frame(HEADERS, END_HEADERS, 3, peer.block()), frame(DATA, 0, 3, message(b"a")))
    assert await peer.echoed(3) == b"a"


async def test_a_peer_that_asks_and_never_reads_is_left(
    served: Served, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "MAX_UNSENT_REPLIES", 10)
    await eventually(lambda: len(served.server.connections) == 1)
    (connection,) = served.server.connections
    connection.pause_writing()
    peer.send(*(frame(PING, 0, 0, b"12345678") for _ in range(20)))
    assert await peer.ended_with() == 11


async def test_a_connection_that_is_lost_ends_its_calls(served: Served, peer: Peer) -> None:
    peer.send(frame(HEADERS, END_HEADERS, 1, peer.block("Wait")), frame(DATA, 0, 1, message(b"a")))
    await eventually(lambda: served.server.streams == 1)
    peer.writer.transport.abort()
    await eventually(lambda: served.left == 1)
    await eventually(lambda: not served.server.connections)
