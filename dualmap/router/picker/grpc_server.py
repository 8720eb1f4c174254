"""gRPC over HTTP/2, as a gateway speaks it: a few connections with many streams of a few messages each.

Only what a server of such streams needs is here (RFC 9113, and gRPC's ``PROTOCOL-HTTP2``): no push, no priorities, no
compression of messages. It is written for its cost, as the HTTP data plane is: grpc.aio takes three times as much for
the four messages of a request.

Header blocks are read by ``hpack``. Peers are asked to keep no table of header fields, so that a block means the same
each time, and is looked up instead of read from the second time on. What is sent are a few constant blocks.

Flow control: the window of a stream has room for two of the longest messages, and is given back as messages are read,
so a slow reader slows its stream down. A writer waits for the windows of the other side, and for its socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any, Final, cast
from urllib.parse import quote

from hpack import Decoder, HPACKError

log = logging.getLogger(__name__)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES: Final = 16 << 10
"""Longest frame that is taken: the least that HTTP/2 allows to ask for."""
MAX_HEADER_BYTES: Final = 64 << 10
MAX_UNSENT_REPLIES: Final = 1000
"""Frames that a peer may cause while it does not read, as by pings; then its connection ends."""
CLOSED_WITHIN_S: Final = 1.0
"""Time for what was sent last to leave before connections are broken off."""
_KNOWN_BLOCKS: Final = 256
"""Header blocks that a connection remembers."""
_MAX_WINDOW: Final = (1 << 31) - 1
_USUAL_WINDOW: Final = 65_535

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = range(6)
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(6, 10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 1, 2, 4, 5, 6
_HEAD: Final = Struct(">IBI")
"""Length and type, flags, stream."""
_SETTING: Final = Struct(">HI")
_WORD: Final = Struct(">I")
_PREFIX: Final = Struct(">BI")
"""The prefix of a message: whether it is compressed, and its length."""


class _Error(IntEnum):
    """Error codes of HTTP/2."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Status(IntEnum):
    """Status codes of gRPC that are answered here."""

    OK = 0
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class StatusError(Exception):
    """Ends a stream with a status."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class LeftError(Exception):
    """The peer has ended the stream."""


class _ConnectionError(Exception):
    """The connection cannot go on."""

    def __init__(self, code: _Error, why: str) -> None:
        super().__init__(why)
        self.code = code


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that no table keeps."""
    return b"\x00%c%b%c%b" % (len(name), name, len(value), value)


_STATUS_200: Final = b"\x88"
_REPLY_FIELDS: Final = _STATUS_200 + _literal(b"content-type", b"application/grpc")
_SUCCESS: Final = _literal(b"grpc-status", b"0")
_LONGEST_MESSAGE: Final = 100


def _end_fields(status: Status, message: str) -> bytes:
    if status is Status.OK:
        return _SUCCESS
    text = quote(message[:_LONGEST_MESSAGE], safe=" !#$&'()*+,/:;<=>?@[]^_`{|}~")[:120].encode()
    return _literal(b"grpc-status", b"%d" % status) + _literal(b"grpc-message", text)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


class GrpcStream:
    """One call: messages in, messages out. ``read`` and ``write`` are for its handler alone."""

    def __init__(self, connection: GrpcConnection, stream_id: int, send_window: int, parse: Parse) -> None:
        self._connection = connection
        self._parse = parse
        self.stream_id = stream_id
        self.peer = connection.peer
        """Address that it comes from, as gRPC writes it: ``ipv4:10.0.0.1:4711``."""
        self.task: asyncio.Task[None] | None = None
        self._send_window = send_window
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._assembled: bytearray | None = None
        """The begin of a message that has not come whole, with its prefix."""
        self._length = 0
        """Length of that message with its prefix, once it is known."""
        self._receive_window = connection.window_bytes
        self._consumed = 0
        """Bytes that were read and not yet given back to the peer's window."""
        self._ended = False
        """Nothing more comes."""
        self._closed = False
        """Nothing more is sent."""
        self._sent_head = False

    async def read(self) -> Any | None:
        """The next message; None after the last one."""
        while not self._messages:
            if self._ended:
                return None
            self._waiter = self._connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._consumed += len(message) + _PREFIX.size
        if not self._ended and self._consumed >= self._connection.window_bytes // 4:
            self._connection.give_back(self.stream_id, self._consumed)
            self._receive_window += self._consumed
            self._consumed = 0
        return self._parse(message)

    async def write(self, message: bytes) -> None:
        """Send a message.

        Raises:
            LeftError: the peer takes nothing more.
        """
        connection = self._connection
        data = _PREFIX.pack(0, len(message)) + message
        size = len(data)
        if self._closed:
            raise LeftError
        head = b"" if self._sent_head else _frame(_HEADERS, _END_HEADERS, self.stream_id, _REPLY_FIELDS)
        self._sent_head = True
        if size <= connection.max_frame_bytes and size <= self._send_window and connection.has_room(size):
            self._send_window -= size
            connection.send(head + _HEAD.pack(size << 8 | _DATA, 0, self.stream_id) + data)
            return
        if head:
            connection.send(head)
        await self._write_in_parts(data)

    async def _write_in_parts(self, data: bytes) -> None:
        """Send what is longer than a frame, or than the windows are now."""
        connection, at = self._connection, 0
        while at < len(data):
            size = min(len(data) - at, connection.max_frame_bytes, self._send_window, connection.send_window)
            if size <= 0 or connection.is_paused:
                await connection.room()
            else:
                self._send_window -= size
                connection.send_window -= size
                connection.send(_frame(_DATA, 0, self.stream_id, data[at : at + size]))
                at += size
            if self._closed:
                raise LeftError

    # what the connection reports ---------------------------------------------------------------------------------
    def spend(self, size: int, padding: int) -> None:
        """Take a frame of so many bytes, padding included, from the peer's window."""
        self._receive_window -= size
        self._consumed += padding
        if self._receive_window < 0:
            raise _ConnectionError(_Error.FLOW_CONTROL_ERROR, "more comes on a stream than its window allows")

    def feed(self, data: bytes) -> None:
        """Take in bytes of messages. Raises StatusError."""
        if self._assembled is None:
            at, end = 0, len(data)
            while end - at >= _PREFIX.size:
                last = at + _PREFIX.size + self._length_of(data, at)
                if last > end:
                    break
                self._messages.append(data[at + _PREFIX.size : last])
                at = last
            if at < end:
                self._assembled = bytearray(data[at:] if at else data)
                self._length = 0
            self._wake()
            return
        assembled = self._assembled
        assembled += data
        if not self._length and len(assembled) >= _PREFIX.size:
            self._length = _PREFIX.size + self._length_of(assembled, 0)
        if self._length and len(assembled) >= self._length:
            self._assembled = None
            self.feed(bytes(assembled))

    def _length_of(self, data: bytes | bytearray, at: int) -> int:
        compressed, length = _PREFIX.unpack_from(data, at)
        if compressed:
            raise StatusError(Status.UNIMPLEMENTED, "messages are not to be compressed")
        if length > self._connection.max_message_bytes:
            longest = self._connection.max_message_bytes
            raise StatusError(
                Status.RESOURCE_EXHAUSTED, f"a message has {length} bytes, the longest may have {longest}"
            )
        return int(length)

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._wake()

    def reset(self) -> None:
        """The peer wants nothing more of it."""
        self._closed = self._ended = True
        if self.task is not None:
            self.task.cancel()

    def widen(self, size: int) -> None:
        self._send_window += size
        if self._send_window > _MAX_WINDOW:
            raise _ConnectionError(_Error.FLOW_CONTROL_ERROR, "the window of a stream overflows")

    def finish(self, status: Status, message: str = "") -> None:
        """Send the end, unless the peer has ended it."""
        if self._closed:
            return
        self._closed = True
        fields = _end_fields(status, message)
        if not self._sent_head:
            fields = _REPLY_FIELDS + fields
        ends = _frame(_HEADERS, _END_HEADERS | _END_STREAM, self.stream_id, fields)
        if not self._ended:  # the peer need not send the rest
            ends += _frame(_RST_STREAM, 0, self.stream_id, _WORD.pack(_Error.NO_ERROR))
        self._connection.send(ends)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Parse = Callable[[bytes], Any]
"""Makes a message of its bytes."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service."""

    serve: Callable[[GrpcStream], Awaitable[None]]
    """Serves a call: returns at its end, or raises StatusError."""
    parse: Parse


class GrpcConnection(asyncio.Protocol):
    """A connection of a peer."""

    _transport: asyncio.Transport

    def __init__(self, server: GrpcServer) -> None:
        self._server = server
        self.loop = asyncio.get_running_loop()
        self.max_message_bytes = server.max_message_bytes
        self.window_bytes = min(_MAX_WINDOW, 2 * (server.max_message_bytes + MAX_FRAME_BYTES))
        """Window of a stream."""
        self.max_frame_bytes = MAX_FRAME_BYTES
        self.peer = ""
        self.send_window = _USUAL_WINDOW
        self.is_paused = False
        self.streams: dict[int, GrpcStream] = {}
        self._decoder = Decoder(max_header_list_size=MAX_HEADER_BYTES)
        self._known: dict[bytes, str] = {}
        """Paths of header blocks that mean the same each time."""
        self._stream_window = _USUAL_WINDOW
        self._received = 0
        self._rest = b""
        self._is_greeted = False
        self._block: tuple[int, int, bytes] | None = None
        """Stream, flags and begin of a header block that goes on."""
        self._last_id = 0
        self._is_going = False
        self._unsent = 0
        self._outgoing: list[bytes] = []
        self._room: list[asyncio.Future[None]] = []

    # the transport -----------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self.peer = _peer_of(transport.get_extra_info("peername"))
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._server.connections.add(self)
        settings = {
            _HEADER_TABLE_SIZE: 0,
            _ENABLE_PUSH: 0,
            _INITIAL_WINDOW_SIZE: self.window_bytes,
            _MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
        }
        self.send(_frame(_SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in settings.items())))
        self.send(_frame(_WINDOW_UPDATE, 0, 0, _WORD.pack(_MAX_WINDOW - _USUAL_WINDOW)))
        if self._server.is_stopping:
            self.go_away()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.one_is_gone(self)
        for stream in list(self.streams.values()):
            stream.reset()
        self._wake()

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self._unsent = 0
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            if not self._is_greeted:
                if data[: len(PREFACE)] != PREFACE[:end]:
                    raise _ConnectionError(_Error.PROTOCOL_ERROR, "it does not begin as HTTP/2 does")
                if end >= len(PREFACE):
                    self._is_greeted = True
                    at = len(PREFACE)
            while self._is_greeted and end - at >= _HEAD.size:
                kind, flags, stream_id = _HEAD.unpack_from(data, at)
                begin = at + _HEAD.size
                last = begin + (kind >> 8)
                if last - begin > MAX_FRAME_BYTES:
                    raise _ConnectionError(_Error.FRAME_SIZE_ERROR, "a frame is too long")
                if last > end:
                    break
                self._on_frame(kind & 0xFF, flags, stream_id & _MAX_WINDOW, data[begin:last])
                at = last
        except (_ConnectionError, struct.error) as error:
            log.warning("a connection of %s ends: %s", self.peer or "a peer", error)
            self.go_away(error.code if isinstance(error, _ConnectionError) else _Error.FRAME_SIZE_ERROR)
            self._flush()
            self._transport.close()
            return
        self._rest = data[at:] if at < end else b""

    def send(self, frames: bytes) -> None:
        """Send frames, with all others of this turn of the event loop."""
        if not self._outgoing:
            self.loop.call_soon(self._flush)
        self._outgoing.append(frames)

    def _flush(self) -> None:
        outgoing = self._outgoing
        if outgoing and not self._transport.is_closing():
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        outgoing.clear()

    def _reply(self, frame: bytes) -> None:
        """Send what the peer has asked for by a frame of its own."""
        if self.is_paused:
            self._unsent += 1
            if self._unsent > MAX_UNSENT_REPLIES:
                raise _ConnectionError(_Error.ENHANCE_YOUR_CALM, "it asks for replies, and does not read them")
        self.send(frame)

    # flow control ------------------------------------------------------------------------------------------------
    def has_room(self, size: int) -> bool:
        """Whether so much can be sent now; then it is taken from the window."""
        if size > self.send_window or self.is_paused:
            return False
        self.send_window -= size
        return True

    async def room(self) -> None:
        """Wait until more can be sent."""
        waiter = self.loop.create_future()
        self._room.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._room = self._room, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def give_back(self, stream_id: int, size: int) -> None:
        """Let the peer send so much more on a stream."""
        self.send(_frame(_WINDOW_UPDATE, 0, stream_id, _WORD.pack(size)))

    # frames ------------------------------------------------------------------------------------------------------
    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (kind != _CONTINUATION or stream_id != self._block[0]):
            raise _ConnectionError(_Error.PROTOCOL_ERROR, "a header block is interrupted")
        if kind == _DATA:
            self._on_data(flags, stream_id, payload)
        elif kind == _HEADERS:
            self._on_headers(flags, stream_id, payload)
        elif kind == _WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == _RST_STREAM:
            stream = self.streams.get(stream_id)
            if stream is not None:
                stream.reset()
        elif kind == _SETTINGS:
            self._on_settings(flags, payload)
        elif kind == _PING and not flags & _ACK:
            self._reply(_frame(_PING, _ACK, 0, payload))
        elif kind == _CONTINUATION:
            self._on_continuation(flags, payload)
        elif kind == _PUSH_PROMISE:
            raise _ConnectionError(_Error.PROTOCOL_ERROR, "a client pushes")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received > _MAX_WINDOW // 2:
            self.give_back(0, self._received)
            self._received = 0
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_id or not stream_id:
                raise _ConnectionError(_Error.PROTOCOL_ERROR, "data of a stream that has not begun")
            return  # it is over here: the rest was under way
        size = len(payload)
        if flags & _PADDED:
            payload = _unpadded(payload)
        stream.spend(size, size - len(payload))
        try:
            if payload:
                stream.feed(payload)
        except StatusError as error:
            stream.finish(error.status, str(error))
            stream.reset()
            return
        if flags & _END_STREAM:
            stream.end()

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _HAS_PRIORITY:
            payload = payload[5:]
        if flags & _END_HEADERS:
            self._on_block(flags, stream_id, payload)
        else:
            self._block = stream_id, flags, payload

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise _ConnectionError(_Error.PROTOCOL_ERROR, "a header block goes on that has not begun")
        stream_id, first_flags, begun = self._block
        block = begun + payload
        if len(block) > MAX_HEADER_BYTES:
            raise _ConnectionError(_Error.ENHANCE_YOUR_CALM, "a header block is too long")
        self._block = stream_id, first_flags, block
        if flags & _END_HEADERS:
            self._block = None
            self._on_block(first_flags, stream_id, block)

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        path = self._known.get(block)
        if path is None:
            path = self._path_of(block)
        stream = self.streams.get(stream_id)
        if stream is not None:  # trailers, of which a client has none to say
            if not flags & _END_STREAM:
                raise _ConnectionError(_Error.PROTOCOL_ERROR, "a stream begins twice")
            return stream.end()
        if not stream_id & 1:
            raise _ConnectionError(_Error.PROTOCOL_ERROR, "a client's stream has the number of a server's")
        if stream_id <= self._last_id:
            return None  # the end of a stream that is over here
        if self._is_going:
            return self._reply(_frame(_RST_STREAM, 0, stream_id, _WORD.pack(_Error.REFUSED_STREAM)))
        self._last_id = stream_id
        method = self._server.methods.get(path, _UNKNOWN)
        stream = self.streams[stream_id] = GrpcStream(self, stream_id, self._stream_window, method.parse)
        if flags & _END_STREAM:
            stream.end()
        stream.task = self.loop.create_task(self._serve(stream, method))
        return None

    def _path_of(self, block: bytes) -> str:
        decoder = self._decoder
        try:
            fields = decoder.decode(block, raw=True)
        except (HPACKError, UnicodeDecodeError) as error:
            raise _ConnectionError(_Error.COMPRESSION_ERROR, f"header fields cannot be read: {error}") from error
        path = next((bytes(value) for name, value in fields if name == b":path"), b"").decode("latin-1")
        if decoder.header_table_size == 0:
            if len(self._known) >= _KNOWN_BLOCKS:
                self._known.clear()
            self._known[block] = path
        return path

    async def _serve(self, stream: GrpcStream, method: Method) -> None:
        try:
            await method.serve(stream)
            stream.finish(Status.OK)
        except StatusError as error:
            stream.finish(error.status, str(error))
        except LeftError:
            pass
        except asyncio.CancelledError:
            stream.finish(Status.UNAVAILABLE, "the picker ends")
            raise
        except Exception:
            log.exception("a call failed")
            stream.finish(Status.INTERNAL, "see the log of the picker")
        finally:
            self.streams.pop(stream.stream_id, None)
            self._server.one_is_over()
            if self._is_going and not self.streams:
                self._flush()
                self._transport.close()

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        (size,) = _WORD.unpack(payload)
        if stream_id == 0:
            self.send_window += size
            if self.send_window > _MAX_WINDOW:
                raise _ConnectionError(_Error.FLOW_CONTROL_ERROR, "the window of the connection overflows")
        elif stream_id in self.streams:
            self.streams[stream_id].widen(size)
        if self._room:
            self._wake()

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & _ACK:
            self._decoder.max_allowed_table_size = 0
            return
        for name, value in _SETTING.iter_unpack(payload):
            if name == _INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.widen(value - self._stream_window)
                self._stream_window = value
            elif name == _MAX_FRAME_SIZE:
                self.max_frame_bytes = min(value, 1 << 20)
        self._reply(_frame(_SETTINGS, _ACK, 0))
        self._wake()

    # the end -----------------------------------------------------------------------------------------------------
    def go_away(self, code: _Error = _Error.NO_ERROR) -> None:
        """Take no further stream."""
        if not self._is_going:
            self._is_going = True
            self.send(_frame(_GOAWAY, 0, 0, _WORD.pack(self._last_id) + _WORD.pack(code)))

    def leave(self) -> None:
        """Go away, and close where no stream is left."""
        self.go_away()
        if not self.streams:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self._transport.abort()


class GrpcServer:
    """Serves methods by their paths, ``/SERVICE/METHOD``, from ``start`` to ``close``."""

    def __init__(self, methods: Mapping[str, Method], *, max_message_bytes: int) -> None:
        self.methods = methods
        self.max_message_bytes = max_message_bytes
        self.connections: set[GrpcConnection] = set()
        self.is_stopping = False
        self._listener: asyncio.Server | None = None
        self._over: asyncio.Future[None] | None = None
        """Waits for the last stream."""
        self._gone: asyncio.Future[None] | None = None
        """Waits for the last connection."""

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take an address; connections are served from ``start`` on. Returns the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        made = loop.create_server(lambda: GrpcConnection(self), host, port, ssl=tls, start_serving=False)
        try:
            self._listener = await made
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        return int(self._listener.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Serve connections."""
        if self._listener is not None:
            await self._listener.start_serving()

    @property
    def streams(self) -> int:
        """Streams that are open."""
        return sum(len(each.streams) for each in self.connections)

    def one_is_over(self) -> None:
        if self._over is not None and not self._over.done() and not self.streams:
            self._over.set_result(None)

    async def drain(self) -> None:
        """Take no new streams, and wait until those that are open have finished."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.leave()
        if self.streams:
            self._over = asyncio.get_running_loop().create_future()
            await self._over

    async def close(self) -> None:
        """Cut off every stream, and wait until their handlers have ended."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        tasks = [stream.task for each in self.connections for stream in each.streams.values() if stream.task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self.connections):
            connection.leave()
        if self.connections:
            self._gone = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._gone}, timeout=CLOSED_WITHIN_S)
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)

    def one_is_gone(self, connection: GrpcConnection) -> None:
        self.connections.discard(connection)
        if self._gone is not None and not self._gone.done() and not self.connections:
            self._gone.set_result(None)


async def _refuse(_: GrpcStream) -> None:
    raise StatusError(Status.UNIMPLEMENTED, "there is no such method here")


_UNKNOWN: Final = Method(_refuse, bytes)


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _ConnectionError(_Error.PROTOCOL_ERROR, "a frame has more padding than bytes")
    return payload[1 : len(payload) - payload[0]]


def _peer_of(name: object) -> str:
    """A peer's address as gRPC writes it: ``ipv4:10.0.0.1:4711``, ``ipv6:[::1]:4711``; "" where it has none."""
    if not isinstance(name, tuple):
        return ""
    host, port = str(name[0]), int(name[1])
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
