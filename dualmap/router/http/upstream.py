"""A connection to an instance: sends one request at a time, hands the answer on as it comes."""

from __future__ import annotations

import asyncio
import fcntl
import termios
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools

from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.errors import RouterError
from dualmap.router.http.plain_heads import Header, PlainAnswer, ReadAnswer, read_answer
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure

if TYPE_CHECKING:
    from dualmap.router.http.answer_driver import AnswerDriver

MAX_HEAD_BYTES: Final = 64 << 10
"""Largest head of an answer, largest trailer and largest extension of a chunk; a longer one is the instance's fault."""

_NOTHING_UNREAD: Final = bytes(4)

_HEAD_END: Final = b"\r\n\r\n"
_HEAD_END_BYTES: Final = len(_HEAD_END)
_LINE_ENDS: Final = b"\r\n"
"""The parser skips these between answers and says nothing."""


_CLOSED: Final = FailureKind.CLOSED
_CHUNKED: Final = Framing.CHUNKED
_LENGTH: Final = Framing.LENGTH
_EMPTY: Final = Framing.EMPTY
_UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE


class AnswerSink(Protocol):
    """The receiver of an answer. Calls come in order: head, bodies, and then nothing or one failure."""

    def head_received(self, head: AnswerHead) -> None: ...

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        """The next bytes: ``wire`` as they came, chunk framing included; ``pieces`` without it.

        With ``complete`` the connection is done with this answer and may be released.
        """

    def failed(self, failure: InstanceFailure) -> None:
        """The answer will not be completed."""

    def probe(self) -> None:
        """See ``ByteSource.probe``."""

    def cut_off(self, error: RouterError) -> None:
        """This replica ends an answer that has begun; the connection is closed."""


class _BodyEvents:
    """The callbacks of a parser that are about an answer's body and its end: for the others it calls nothing."""

    def __init__(self, connection: UpstreamConnection) -> None:
        self.on_message_begin = connection.on_message_begin
        self.on_chunk_header = connection.on_chunk_header
        self.on_body = connection.on_body
        self.on_chunk_complete = connection.on_chunk_complete
        self.on_message_complete = connection.on_message_complete


class UpstreamConnection(asyncio.Protocol):
    """One TCP (or TLS) connection to an instance. Owned by the pool while idle, by a try while in use."""

    def __init__(self, url: str, *, read_plain: ReadAnswer = read_answer) -> None:
        """``read_plain`` reads answers in place of the parser."""
        self.url = url
        self._read_plain = read_plain
        self.loop = asyncio.get_running_loop()
        """The loop is kept, as every query of it costs a system call."""
        self.idle_since_s = 0.0
        self.reused = False
        self.closed = False
        self.silent = True
        """No byte of the present answer has come."""
        self.between_chunks = False
        """A chunk may be inserted here without breaking the framing."""
        self._transport: asyncio.Transport | None = None
        self._file = -1
        """Descriptor of a plain connection."""
        self._unread = bytearray(_NOTHING_UNREAD)
        """Where the kernel writes how many bytes wait. It is kept, as it is read at every use; ``ioctl`` tries one that
        it may write to first, and for any other raises and drops an exception."""
        self._head_parser = httptools.HttpResponseParser(self)
        """Reads answers whose heads are not plain."""
        self._body_parser: httptools.HttpResponseParser | None = None
        """Reads those behind plain heads, of which it reports the body alone; made with the first one."""
        self._parser = self._head_parser
        """The one that reads the present answer."""
        self._sink: AnswerSink | None = None
        self._paused = False
        self.lent_to: AnswerDriver | None = None
        """The answer that reads instead of the transport."""
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""
        self._fields: list[Header] = []
        self._head: AnswerHead | None = None
        self._pieces: list[bytes] = []
        self._informational = 0
        self._unseen_bytes = 0
        """Fed to the parser since it last handed over a piece of the body."""
        self._complete = False
        self._keep_alive = False
        self.offer: AnswerDriver | None = None
        """Gets the next bytes that begin a chunk, if it wants them."""
        self._ends_line = False
        """The last bytes, of an answer that is offered, ended a line."""

    # the owner's side ----------------------------------------------------------------------------------------
    def start(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send a request, its head first. The caller must call ``answer_to`` before it waits for anything. A dead
        connection reports a failure to the sink soon."""
        self._reset()
        self.silent = True
        if self._transport is None or self.closed or self._transport.is_closing():
            self.loop.call_soon(self._fail, _CLOSED, "the connection was closed")
            return
        self._transport.writelines(parts)

    def answer_to(self, sink: AnswerSink) -> None:
        """``sink`` gets the answer to the request that was just sent."""
        self._sink = sink

    @property
    def complete(self) -> bool:
        """The end of the answer has come."""
        return self._complete

    @property
    def reusable(self) -> bool:
        """The last answer is complete and the connection may carry another request."""
        return (
            self._complete
            and self._keep_alive
            and not self.closed
            and self._transport is not None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0  # answered before it had read the whole request
        )

    @property
    def still_reusable(self) -> bool:
        """A ``reusable`` connection is open, and silent: bytes that came unasked would be taken for the next answer.
        Bytes that are under way cannot be seen, nor can any over TLS."""
        if self.closed or self._transport is None or self._transport.is_closing():
            return False
        if self._file < 0:
            return True
        fcntl.ioctl(self._file, termios.FIONREAD, self._unread)
        return self._unread == _NOTHING_UNREAD

    def pause_reading(self) -> None:
        """The client is slower than the instance."""
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    def probe(self) -> None:
        if self._sink is not None:
            self._sink.probe()

    def redirect(self, sink: AnswerSink) -> None:
        """Another receiver of the rest of an answer. A dead connection reports that soon."""
        if self._sink is None or self.closed:
            self.loop.call_soon(sink.failed, InstanceFailure(_CLOSED, "the connection was closed"))
            return
        self._sink = sink

    def give_up(self, error: RouterError) -> None:
        """Close, and let the sink end its answer with ``error``."""
        if self.lent_to is not None:
            self.lent_to.end()
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.cut_off(error)

    @property
    def paused(self) -> bool:
        return self._paused

    def end_writing(self) -> bool:
        """Close our half: the instance sees a disconnect, and what it had sent still comes. False where that cannot be
        done, as over TLS, or the connection is closed."""
        if self._transport is None or self.closed or not self._transport.can_write_eof():
            return False
        self._transport.write_eof()
        return True

    def abort(self) -> None:
        """Close at once; the instance sees a disconnect and drops the request. The sink gets nothing more."""
        self._sink = self.offer = None
        if self.lent_to is not None:
            self.lent_to.drop()
        if self._transport is not None:
            self._transport.abort()

    # the relay's side ----------------------------------------------------------------------------------------
    @property
    def file(self) -> int:
        """Descriptor of a plain connection that is open, else -1."""
        return self._file

    def lend(self, to: AnswerDriver) -> None:
        """``to`` reads from here on."""
        self.lent_to = to
        assert self._transport is not None
        self._transport.pause_reading()

    def end_loan(self) -> None:
        """The transport reads again."""
        self.lent_to = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def go_on(self, unread: bytes, error: OSError | None, *, offers: bool) -> None:
        """Go on with what was read and not used, and an error of the socket. Without ``offers`` those bytes are not
        offered again."""
        self._ends_line = offers
        if unread and self._sink is not None:
            try:
                self.data_received(unread)
            except Exception:  # a transport does so, too: what was not handled would be missing in the answer
                self._fail(_CLOSED, "bytes of the answer could not be handled")
                raise
        if error is not None:
            self._fail(_CLOSED, f"the connection broke: {error}")

    # the transport's side ------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit from asyncio's
        plain = transport.get_extra_info("sslcontext") is None
        self._file = transport.get_extra_info("socket").fileno() if plain else -1

    def data_received(self, data: bytes) -> None:
        if (sink := self._sink) is None:  # unasked bytes on an idle connection: never take them for the next answer
            self.abort()
            return
        if self.offer is not None and self._takes_offer(data):
            return
        self.silent = False
        before = self._head
        if before is None and not self._buffer:
            plain = self._read_plain(data, MAX_HEAD_BYTES)
            if plain is not None:
                self._receive_plain(sink, data, plain)
                return
            self._parser = self._head_parser
        self._pieces = []
        try:
            if data[0] in _LINE_ENDS and before is not None:
                data = self._feed_line_end(data)
            else:
                self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail_unreadable(error)
            return
        if before is None:
            self._receive_head(data)
        elif self._complete:
            self._hand_on(data)
        elif self._pieces:
            self._unseen_bytes = 0
            sink.body_received(data, self._pieces, False)
        elif self._within_bounds(len(data)):
            self._hand_on(data)

    def _receive_plain(self, sink: AnswerSink, data: bytes, plain: PlainAnswer) -> None:
        """Hand on what has come of an answer whose head is plain."""
        status, fields, index, start, body_bytes = plain
        is_chunked, body = body_bytes < 0, data[start:]
        self._head = head = AnswerHead(status, fields, _CHUNKED if is_chunked else _LENGTH, index)
        self._keep_alive = True
        if body_bytes != len(body):
            self.between_chunks = is_chunked
            if self._body_parser is None:
                self._body_parser = httptools.HttpResponseParser(_BodyEvents(self))
            self._parser, self._pieces = self._body_parser, []
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self._fail_unreadable(error)
                return
            self._hand_on_head(body)
            return
        self._complete = True
        sink.head_received(head)
        if self._sink is not None:  # the sink may have given up over the head
            self._sink = self.offer = None
            sink.body_received(body, [body] if body else [], True)

    def _hand_on_head(self, wire: bytes) -> None:
        """Hand on the head of an answer, and the bytes behind it."""
        sink = self._sink
        assert sink is not None
        assert self._head is not None
        sink.head_received(self._head)
        if self._sink is not None:  # the sink may have given up over the head
            self._hand_on(wire)

    def _takes_offer(self, data: bytes) -> bool:
        """Whether the relay reads from these bytes on."""
        # The parser is between chunks also where it has the begin of a chunk's size.
        begins_chunk, self._ends_line = self._ends_line and self.between_chunks, data.endswith(_LINE_ENDS)
        return begins_chunk and not self._paused and self.offer is not None and self.offer.take(data)

    def _within_bounds(self, fed_bytes: int) -> bool:
        """A trailer, or a chunk's extension, that never ends grows inside the parser."""
        self._unseen_bytes += fed_bytes
        if self._unseen_bytes > MAX_HEAD_BYTES:
            self._fail(FailureKind.PROTOCOL, f"the framing of the answer has a part over {MAX_HEAD_BYTES} bytes")
            return False
        return True

    def _feed_line_end(self, data: bytes) -> bytes:
        """Feed bytes that may begin with the rest of the answer's last line; returns them without what comes after
        it."""
        end = len(data)
        for fed in range(1, min(end, len(_HEAD_END)) + 1):
            self._parser.feed_data(data[fed - 1 : fed])
            if self._complete:
                end = fed
                break
        self._parser.feed_data(data[fed:])
        if end < len(data):
            self._keep_alive = False
        return data[:end]

    def _receive_head(self, data: bytes) -> None:
        buffer = self._buffer = self._buffer + data if self._buffer else data
        if self._head is None:
            if len(buffer) > MAX_HEAD_BYTES:
                self._fail(FailureKind.PROTOCOL, f"the head of the answer is over {MAX_HEAD_BYTES} bytes")
            return
        end = 0
        while buffer[end] in _LINE_ENDS:
            end += 1
        end = buffer.index(_HEAD_END, end) + _HEAD_END_BYTES
        for _ in range(self._informational):
            while buffer[end] in _LINE_ENDS:
                end += 1
            end = buffer.index(_HEAD_END, end) + _HEAD_END_BYTES
        self._buffer = b""
        self._hand_on_head(buffer[end:])

    def _hand_on(self, wire: bytes) -> None:
        sink, complete = self._sink, self._complete
        assert sink is not None
        if complete:
            self._sink = self.offer = None
            sink.body_received(self._without_excess(wire), self._pieces, True)
        elif wire:
            sink.body_received(wire, self._pieces, False)

    def _without_excess(self, wire: bytes) -> bytes:
        """The last bytes of the answer; line ends after them would come before the client's next answer."""
        assert self._head is not None
        if self._head.framing is _CHUNKED:
            last_line = wire.rstrip(_LINE_ENDS)
            end = len(last_line) + len(_HEAD_END) if last_line else len(wire)  # else cut when it was fed
        else:
            end = sum(map(len, self._pieces))
        if end >= len(wire):
            return wire
        self._keep_alive = False
        return wire[:end]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lent_to is not None:
            self.lent_to.take_back()
        self.closed = True
        self._file = -1
        self.offer = None
        sink, head = self._sink, self._head
        if sink is None:
            return
        if exc is None and head is not None and head.framing is _UNTIL_CLOSE:
            self._sink = None
            sink.body_received(b"", [], True)
            return
        self._fail(_CLOSED, f"the connection broke: {exc or 'closed by the instance'}")

    def _fail_unreadable(self, error: Exception) -> None:
        self._fail(FailureKind.PROTOCOL, f"not a valid HTTP answer: {error.__context__ or error}")

    def _fail(self, kind: FailureKind, detail: str) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.failed(InstanceFailure(kind, detail))

    # callbacks of the parser ---------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:  # else a trailer: it passes with the bytes
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            raise ValueError(f"a status of {status}")
        if status < 200:
            self._informational += 1
            self._fields = []
            return
        self._keep_alive = self._parser.should_keep_alive()
        index = dict(self._fields)
        framing = _framing(status, self._fields, index)
        self._head = AnswerHead(status, self._fields, framing, index)
        self.between_chunks = framing is _CHUNKED

    def on_chunk_header(self) -> None:
        self.between_chunks = False

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def on_chunk_complete(self) -> None:
        self.between_chunks = True

    def on_message_complete(self) -> None:
        self._complete = self._head is not None  # not the end of an informational answer


def _framing(status: int, fields: list[Header], index: dict[bytes, bytes]) -> Framing:
    """How the body ends. Raises ValueError when the client's framing cannot express it."""
    if status in (204, 304):
        return _EMPTY
    coding = index.get(b"transfer-encoding")
    if coding is not None:
        alone = len(index) == len(fields) or sum(name == b"transfer-encoding" for name, _ in fields) == 1
        if not alone or coding.strip().lower() != b"chunked":
            raise ValueError("a transfer-encoding beside chunked")  # the parser would read until the end
        return _CHUNKED
    return _LENGTH if b"content-length" in index else _UNTIL_CLOSE
