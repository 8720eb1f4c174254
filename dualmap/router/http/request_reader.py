"""Bytes of a client connection in, requests out. No I/O: the connection feeds it and reads what it found.

Rules of this file: nothing is forwarded before its framing is unambiguous (RFC 9112 section 6: one framing, no obsolete
folding, no unknown transfer coding), every buffer has a bound, and every refusal gives its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Final

import httptools

from dualmap.router.errors import BodyTooLargeError, HeadersTooLargeError, InvalidRequestError, RouterError
from dualmap.router.http.body_budget import UNKNOWN_CALLERS, BodyBudget
from dualmap.router.http.paths import FILES_PATH, INFERENCE_PATHS, is_inference, meant_path, split_target
from dualmap.router.http.plain_heads import Header, ReadRequest, read_request
from dualmap.router.http.streamed_body import StreamedBody
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.scheduling.values import record

MAX_HEADER_BYTES = 64 << 10
"""Largest head, and largest trailer."""
MAX_HEADERS = 128
MAX_PIPELINED_REQUESTS = 32
"""Requests read ahead of their answers at most; the connection closes after those (RFC 9112 section 9.3.2)."""

CHUNK_OVERHEAD_BYTES = 16
"""A chunk's size and line ends take no more than this; what is more is an extension."""

CRUMB_BYTES = 4 << 10
"""Smaller pieces of a body are put together, so that none takes much more memory than its bytes."""

DISCARDED_BODY_BYTES = 64 << 10
"""A refused request keeps its connection if its body is announced to be no longer than this."""

STAGE_BYTES = 256 << 10
"""The part of a body for which a client has the time of a request, where the body is answered while it comes."""

_NOT_INDEXED: Final = dict[bytes, bytes]().get
_PLAIN_PATHS: Final = {path.encode(): path for path in INFERENCE_PATHS}
"""The paths that a plain head may name, and nothing behind them."""


@record
class ClientRequest:
    """One request of a client. ``path`` is the one that is meant, not unquoted, without the query."""

    method: str
    path: str
    query: bytes
    fields: list[Header]
    http_10: bool
    keep_alive: bool
    _: KW_ONLY
    body: bytes = b""
    streams: bool = False
    """The request is answered while its body comes."""
    stream: StreamedBody | None = None
    """The body of such a request."""
    refusal: RouterError | None = None
    """Set when the request was refused by its head; the body was thrown away."""
    caller: Caller | None = None
    """The tenant that sends it, and its key; None: no tenant."""
    caller_known: asyncio.Future[None] | None = None
    """Done once ``caller`` can be found out, where the key that signed the client's token is being fetched."""
    from_gateway: bool = False
    """The request came over a connection of the gateway that names tenants."""
    bodies: BodyBudget | None = None
    """The budget in which the body is counted until it is dropped."""
    counted_for: str | None = None
    """The tenant in whose part of the budget it is counted, see ``pays``."""
    hides_body: bool = False
    """The request has a body that its gateway does not send here."""
    was_rewritten: bool = False
    """The target was sent otherwise than path and query are now."""
    client: str | None = None
    """Name of the verified certificate that the client showed; None without one."""
    only: frozenset[str] | None = None
    """The instances that it may be placed on, as the router itself says; None: any."""
    get: Callable[[bytes], bytes | None] = _NOT_INDEXED
    """The first field of a (lower-case) name."""
    all_differ: bool = True
    """No name of a field occurs twice."""

    def __post_init__(self) -> None:
        if self.get is _NOT_INDEXED:
            index = dict(reversed(self.fields))
            self.get = index.get
            self.all_differ = len(index) == len(self.fields)

    @property
    def pays(self) -> str | None:
        """The tenant whose part of the budget its body is counted in; None: that of clients without one."""
        if self.caller is not None:
            return self.caller.tenant.name
        return None if self.caller_known is None else UNKNOWN_CALLERS

    def count(self, name: bytes) -> int:
        """How often a (lower-case) name occurs."""
        if self.all_differ:
            return int(self.get(name) is not None)
        return sum(1 for other, _ in self.fields if other == name)

    def drop_body(self) -> None:
        """The body was sent on, or never will be."""
        if self.bodies is not None:
            self.bodies.give_back(len(self.body), self.counted_for)
        self.body = b""


HeadCheck = Callable[[ClientRequest], int]
"""Looks at a head before the body comes: the body's limit in bytes, or raises RouterError to refuse it."""


class _StopError(Exception):
    """Leaves the parser from within its callback."""


class RequestReader:
    """A request parser with limits. After ``stopped`` it must not be fed again.

    Bodies are counted in ``bodies`` as they come. The caller must call ``drop_body`` of every complete request, and of
    the reader when its connection is lost.
    """

    def __init__(
        self,
        check_head: HeadCheck,
        *,
        bodies: BodyBudget,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_headers: int = MAX_HEADERS,
        read_plain: ReadRequest = read_request,
        hold: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """``read_plain`` reads heads in place of the parser. ``hold`` stops feeding (True), or lets it continue, where
        a body is read while it comes."""
        self._check_head = check_head
        self._hold = hold
        self._read_plain = read_plain
        self._plain_body_left = 0
        """Bytes that are missing of a body behind a plain head."""
        self._bodies = bodies
        self._pays: str | None = None
        """The tenant whose body is being read, see ``ClientRequest.pays``."""
        self._max_header_bytes = max_header_bytes
        self._max_headers = max_headers
        self._parser = httptools.HttpRequestParser(self)
        self._fed = b""
        self._complete: list[ClientRequest] = []
        self._ended_one = False
        """A request has ended in the present feed."""
        self._seen = False
        """The present feed made the parser hand over a head, a piece of a body or the end of a request."""
        self._request: ClientRequest | None = None
        self._upgrading = False
        self.reading = False
        """A request has begun and is not complete."""
        self.expects_continue = False
        """The request being read waits for ``100 Continue``; the connection clears it when it has sent that."""
        self.stopped = False
        self.refusal: RouterError | None = None
        """Why the input after the complete requests cannot be read; the connection answers it and closes."""
        self._begin()

    def _begin(self) -> None:
        self._earlier: list[bytes] = []
        """Bytes that were fed since the request began, while its head is not whole."""
        self._pipelined = self._ended_one
        """The request began after another one in the same feed."""
        self._target = b""
        self._fields: list[Header] = []
        """Fields of the head; then those of the trailer, which are not used."""
        self._fed_unseen = 0
        """Bytes fed since the parser last handed over what it had: it keeps nothing of them."""
        self._head_done = False
        self._pieces: list[bytes] = []
        """Those of the body, joined once: a body that comes in one piece is never copied, and no buffer grows."""
        self._crumbs = bytearray()
        """Pieces behind these that are too small to be kept one by one: one may be as small as a byte."""
        self._held_bytes = 0
        """Bytes of both."""
        self._body_bytes = 0
        self._body_limit = 0
        self._stage = 0
        self._chunks = 0
        self._extension_bytes = 0
        """Bytes of the body's framing beyond what its chunks need; below 0 where a feed cut them."""
        self.expects_continue = False

    @property
    def path(self) -> str:
        """Path of the request being read; empty before its head is complete."""
        return self._request.path if self._request is not None else ""

    def feed(self, data: bytes) -> list[ClientRequest]:
        """Read on; returns the requests completed by ``data`` (which may be several, or none). One whose body streams
        counts as complete once its head is."""
        self._complete = []
        self._seen = self._ended_one = False
        request = self._request
        if request is not None:
            body_bytes, chunks = self._body_bytes, self._chunks
        left = data
        while left:
            if self._plain_body_left:
                left = self._take_plain_body(left)
            elif self.reading or len(self._complete) >= MAX_PIPELINED_REQUESTS:
                left = self._parse(left)
            else:
                left = self._take_plain(left)
        if self.reading and not self.stopped:
            if not self._seen:
                self._count_unseen(len(data))
            elif request is not None and request is self._request:
                self._count_extensions(len(data) - (self._body_bytes - body_bytes), self._chunks - chunks)
        return self._complete

    def _take_plain(self, data: bytes) -> bytes:
        """Read a request, by the parser where its head is not plain; returns what must be fed again."""
        found = self._read_plain(data, self._max_header_bytes, self._max_headers)
        if found is None or (path := _PLAIN_PATHS.get(found[0])) is None:
            return self._parse(data)
        _, fields, index, start, body_bytes = found
        request = ClientRequest(
            "POST", path, b"", fields, False, True, get=index.get, all_differ=len(index) == len(fields)
        )
        end = start + body_bytes
        is_whole = end <= len(data)
        if not is_whole:
            self._begin()
            self._head_done = True
        self._request = request
        self._seen = self.reading = True
        try:
            self._admit(request)
            if not is_whole:
                self._plain_body_left = body_bytes
                return data[start:]
            if request.refusal is None:
                self._bodies.take(body_bytes, self._pays)
                request.body, request.bodies, request.counted_for = data[start:end], self._bodies, self._pays
        except _StopError:
            return b""
        except RouterError as refusal:
            self._stop(refusal)
            return b""
        self._request, self.reading = None, False
        self._ended_one = True
        self._complete.append(request)
        return data[end:]

    def _take_plain_body(self, data: bytes) -> bytes:
        """Read on in a body behind a plain head; returns what follows it."""
        piece = data[: self._plain_body_left]
        self._plain_body_left -= len(piece)
        try:
            self.on_body(piece)
        except _StopError:
            return b""
        if not self._plain_body_left:
            self.on_message_complete()
        return data[len(piece) :]

    def end(self) -> None:
        """The client sends no more: the request being read will not be completed."""
        self.drop_body()
        self.reading = False
        self.stopped = True

    def _count_unseen(self, fed_bytes: int) -> None:
        """A field that never ends, of the head or of a trailer, grows inside the parser, unseen by on_header: count
        what was fed since the parser last handed over what it had."""
        self._fed_unseen += fed_bytes
        if self._fed_unseen > self._max_header_bytes:
            part = "trailer" if self._head_done else "head"
            refused = self._request.refusal if self._request is not None else None
            self._stop(refused or self._too_long(part))

    def _count_extensions(self, framing_bytes: int, chunks: int) -> None:
        self._extension_bytes += framing_bytes - chunks * CHUNK_OVERHEAD_BYTES
        if self._extension_bytes > self._max_header_bytes:
            assert self._request is not None
            self._stop(self._request.refusal or self._too_long("framing (chunk extensions)"))

    def _too_long(self, part: str) -> HeadersTooLargeError:
        return HeadersTooLargeError(f"the request {part} is over {self._max_header_bytes} bytes; shorten it")

    def _too_large(self, request: ClientRequest) -> BodyTooLargeError:
        advice = "shorten it, or raise router.max_body_bytes" if is_inference(request.path) else "shorten it"
        if request.path == FILES_PATH:
            advice = "divide the file, or raise router.batches.max_file_bytes"
        return BodyTooLargeError(f"the request body is over {self._body_limit} bytes; {advice}")

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; returns what must be fed again."""
        self._fed = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._stop_after(error)
        if self.reading and not self._head_done:
            self._earlier.append(data)
        return b""

    def stage_begins(self) -> bool:
        """Whether another ``STAGE_BYTES`` have come, since the last call, of a body that is answered meanwhile."""
        if self._request is None or self._request.stream is None:
            return False
        stage, self._stage = self._stage, self._body_bytes // STAGE_BYTES
        return self._stage > stage

    def drop_body(self, refusal: RouterError | None = None) -> None:
        """The request being read will not be complete. ``refusal``: why."""
        if self._request is not None and self._request.stream is not None:
            self._request.stream.break_off(refusal)
        self._bodies.give_back(self._held_bytes, self._pays)
        self._drop_pieces()

    def _stop(self, refusal: RouterError | None) -> None:
        self.drop_body(refusal)
        self.stopped = True
        self.refusal = refusal

    def _stop_after(self, error: httptools.HttpParserError) -> None:
        if self.stopped or (self._complete and not self._complete[-1].keep_alive):
            # The request was refused in a callback already; or data came after a request with "Connection: close".
            self.stopped = True
            return
        self._stop(InvalidRequestError(f"this is not a valid HTTP/1.1 request: {error}"))

    def _refuse(self, refusal: RouterError | None) -> None:
        self._stop(refusal)
        raise _StopError

    def _without_upgrade(self, rest: bytes) -> bytes:
        """No upgrade is offered (RFC 9110 section 7.8: ignore it): the same request without the offer.

        The parser has no option for that and skips the body, hence a second one that never sees the field.
        """
        request, self._request, self._upgrading = self._request, None, False
        if request is None:  # CONNECT: refused, and what follows belongs to no request
            self.stopped = True
            return b""
        query = b"?" + request.query if request.query else b""
        version = b"1.0" if request.http_10 else b"1.1"
        path = request.path.encode("latin-1")
        lines = [b"%b %b%b HTTP/%b\r\n" % (request.method.encode(), path, query, version)]
        for name, value in request.fields:
            if name == b"connection":  # what else it nominates still ends at this hop (RFC 9110 section 7.6.1)
                value = b",".join(token for token in value.split(b",") if token.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b\r\n" % (name, value))
        if not request.keep_alive:
            lines.append(b"connection: close\r\n")
        self._parser = httptools.HttpRequestParser(self)
        return b"".join([*lines, b"\r\n", rest])

    # callbacks of the parser ---------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        if len(self._complete) >= MAX_PIPELINED_REQUESTS:
            self._refuse(None)
        self.reading = True
        self._begin()

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        if len(self._target) > self._max_header_bytes:
            self._refuse(self._too_long("target"))

    def on_header(self, name: bytes, value: bytes) -> None:
        # The number of fields is bounded by the bytes of a feed and by ``_count_unseen`` until they are counted.
        self._fields.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        self._check_fields("head", len(self._target))
        self._seen, self._fed_unseen = True, 0
        self._head_done = True
        request = self._head()
        self._fields = []
        self._check_framing(request)
        self._request = request
        if self._parser.should_upgrade() and request.method != "CONNECT":
            self._upgrading = True
            return
        self._admit(request)
        if (expected := request.get(b"expect")) is not None and expected.lower() == b"100-continue":
            # RFC 9110 section 10.1.1: HTTP/1.0 knows no informational answers.
            self.expects_continue = request.refusal is None and not request.http_10
        if request.streams and request.refusal is None:
            request.stream = StreamedBody(self._bodies, self._pays, self._hold)
            self._complete.append(request)

    def _admit(self, request: ClientRequest) -> None:
        """Check a head, and find out how long a body may follow; one that is refused keeps its connection if its body
        can be dropped."""
        try:
            if request.refusal is not None:
                raise request.refusal
            self._body_limit = self._check_head(request)
            self._pays = request.pays
            announced = request.get(b"content-length")
            if announced is not None and int(announced) > self._body_limit:
                raise self._too_large(request)
        except RouterError as refusal:
            if not self._can_discard_body(request):
                self._refuse(refusal)
            request.refusal = refusal

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, piece: bytes) -> None:
        self._seen, self._fed_unseen = True, 0
        request = self._request
        assert request is not None
        self._body_bytes += len(piece)
        if request.refusal is not None:
            if self._body_bytes > DISCARDED_BODY_BYTES:
                self._refuse(request.refusal)
            return
        if self._body_bytes > self._body_limit:
            self._refuse(self._too_large(request))
        try:
            if request.stream is not None:
                request.stream.feed(piece)
                return
            self._bodies.take(len(piece), self._pays)
        except RouterError as refusal:
            self._refuse(refusal)
        self._held_bytes += len(piece)
        if len(piece) < CRUMB_BYTES and self._pieces:
            self._crumbs += piece
            if len(self._crumbs) < CRUMB_BYTES:
                return
            piece = b""
        if self._crumbs:
            self._pieces.append(bytes(self._crumbs))
            self._crumbs = bytearray()
        if piece:
            self._pieces.append(piece)

    def _drop_pieces(self) -> None:
        self._pieces, self._held_bytes = [], 0
        if self._crumbs:
            self._crumbs = bytearray()

    def on_message_complete(self) -> None:
        if self._fields:
            self._check_fields("trailer", 0)
        self._seen, self._fed_unseen = True, 0
        if self._upgrading:
            return
        request = self._request
        assert request is not None
        if request.stream is not None:
            request.stream.end()
        elif request.refusal is None:
            pieces = self._pieces
            request.body = pieces[0] if len(pieces) == 1 and not self._crumbs else b"".join((*pieces, self._crumbs))
            request.bodies, request.counted_for = self._bodies, self._pays
        self._request = None
        self._drop_pieces()
        self.expects_continue = False
        self.reading = False
        self._ended_one = True
        if request.stream is None:
            self._complete.append(request)
        if not request.keep_alive:
            self.stopped = True

    def _check_fields(self, part: str, target_bytes: int) -> None:
        fields = self._fields
        if len(fields) > self._max_headers:
            count = f"the request has over {self._max_headers} header fields"
            self._refuse(HeadersTooLargeError(f"{count}; send fewer"))
        if len(self._fed) + self._fed_unseen > self._max_header_bytes:  # else no part of it can be
            head_bytes = target_bytes + sum(len(name) + len(value) + 4 for name, value in fields)
            if head_bytes > self._max_header_bytes:
                self._refuse(self._too_long(part))

    # the head ------------------------------------------------------------------------------------------------
    def _head(self) -> ClientRequest:
        target, method = self._target, self._parser.get_method()
        version = self._version(method, target)
        if not target.startswith(b"/"):
            target = self._origin_form(target)
        path, query = split_target(target.decode("latin-1"))
        refusal: RouterError | None = None
        try:
            path = meant_path(path)
        except RouterError as error:
            refusal = error
        return ClientRequest(
            method.decode("ascii"),
            path,
            query.encode("latin-1"),
            self._fields,
            version != "1.1",
            version == "1.1" and self._parser.should_keep_alive(),
            refusal=refusal,
        )

    def _version(self, method: bytes, target: bytes) -> str:
        """The version of a request line. The parser accepts other protocols (RTSP) and versions, or none, as HTTP, and
        reports only their numbers."""
        line = b"%b %b HTTP/1.1\r\n" % (method, target)
        if not self._pipelined and self._fed.startswith(line):
            return "1.1"
        version = self._parser.get_http_version()
        line = b"%b %b HTTP/%b\r\n" % (method, target, version.encode())
        fed = b"".join((*self._earlier, self._fed)) if self._earlier else self._fed
        at_hand = fed.startswith(line) or (
            line in fed if self._pipelined else fed.lstrip(b"\r\n").startswith(line)  # behind empty lines
        )
        if not at_hand or version not in ("1.1", "1.0"):
            self._refuse(InvalidRequestError("the request line must end with one blank and HTTP/1.1 or HTTP/1.0"))
        return version

    def _origin_form(self, target: bytes) -> bytes:
        """``http://host/path`` is legal for any server; ``*`` and CONNECT's authority stay as they are."""
        if not target.startswith((b"http://", b"https://")):
            return target
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserError:
            self._refuse(InvalidRequestError("the request target is no valid URL"))
        return (url.path or b"/") + (b"?" + url.query if url.query else b"")

    def _check_framing(self, request: ClientRequest) -> None:
        """Refuse what the parser accepts although two readers could disagree where the body ends."""
        coding = request.get(b"transfer-encoding")
        if coding is not None:
            if request.count(b"transfer-encoding") > 1:
                self._refuse(InvalidRequestError("a request has one transfer-encoding at most"))
            if request.http_10:
                self._refuse(InvalidRequestError("HTTP/1.0 knows no transfer-encoding; send a content-length"))
            if coding.strip().lower() != b"chunked":
                self._refuse(InvalidRequestError("the only transfer-encoding understood is: chunked"))
        hosts = request.count(b"host")
        if hosts > 1 or (hosts == 0 and not request.http_10):
            self._refuse(InvalidRequestError("an HTTP/1.1 request needs exactly one host header"))

    def _can_discard_body(self, request: ClientRequest) -> bool:
        if request.get(b"expect") is not None:
            return False  # the client waits for an answer before it sends the body: the refusal is that answer
        if request.get(b"transfer-encoding") is not None:
            return True  # bounded in on_body
        return int(request.get(b"content-length") or 0) <= DISCARDED_BODY_BYTES
