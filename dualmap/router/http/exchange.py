"""One try of a request on one instance: its answer, as it is passed on to the client.

    holding ── first event or body byte ──▶ watching ── first token ──▶ passing ── end ──▶ done
       │                                        └───────── failure ────────┴──▶ broken off
       └── failure, status of another's fault, error event first ──▶ failed, nothing sent: another instance may try

Until the first event or byte of the body has come nothing of the answer is sent, so every failure up to there costs the
client nothing. Comments of a stream, by which an engine keeps the connection alive, are no part of the answer: they
pass at once, behind the head, and another instance may still answer in the same stream. What is too long to be held
passes unread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dualmap.router.answers.checks import (
    JSON_STARTS,
    OBJECT_PATHS,
    TAIL_BYTES,
    TRUNCATED,
    ends_whole,
    failure_of_object,
    may_be_no_answer,
    retry_after_s,
    starts_events,
)
from dualmap.router.answers.last_words import last_words
from dualmap.router.answers.output_marks import EVENT_END, cut_mark, first_outputs, output_mark
from dualmap.router.answers.sse import (
    COMMENT,
    NO_ENDING,
    Ending,
    EventSplitter,
    ending_of,
    ends_event,
    event_object,
    is_comment,
    read_ending,
    starts_output,
)
from dualmap.router.answers.sse import (
    EVENT_END as SOME_EVENT_ENDS,
)
from dualmap.router.answers.usage_remover import UsageRemover
from dualmap.router.answers.usage_scan import UsageScan
from dualmap.router.errors import RouterError, UpstreamError, UpstreamTimeoutError
from dualmap.router.http.downstream import Downstream
from dualmap.router.http.exchange_result import (
    GIVEN_BACK,
    MARK_BYTES,
    ErrorAnswer,
    ExchangeResult,
    ExchangeTimes,
    error_of_event,
    failure_in,
    failure_of_whole,
    gives_back,
    is_retried,
)
from dualmap.router.http.heads import Header, as_chunk, chunker, fields_for_client, response_head
from dualmap.router.http.relayed_answer import RelayedAnswer
from dualmap.router.http.upstream import AnswerHead, Framing, UpstreamConnection
from dualmap.router.prompts.inference_request import MESSAGES_PATH, RESPONSES_PATH
from dualmap.router.relay.relay import EVENTS, HIDE_USAGE, MESSAGES, RESPONSES, Relay
from dualmap.scheduling.request.answers import Verdict, judge_status
from dualmap.scheduling.request.charge import NOTHING_COUNTED, Counted
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure

_LENGTH: Final = Framing.LENGTH
_EMPTY: Final = Framing.EMPTY
_CHUNKED: Final = Framing.CHUNKED
_UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE

_EVENTS_OF: Final = {MESSAGES_PATH: MESSAGES, RESPONSES_PATH: RESPONSES}

MAX_HELD_BYTES: Final = 256 << 10
"""A first event, or the body of an error answer, is held back up to this."""

MAX_LAST_EVENT_BYTES: Final = 8 << 20
"""An event is kept up to this until the next ones have come: the last one may repeat a long request, and its usage
counts."""
_WHOLE_EVENTS: Final = 3
"""Pieces with so many ends of events have two whole ones, if more follow: one with the usage, and one behind it."""

_STREAM_TYPE: Final = b"text/event-stream"
_STREAM_TYPE_BYTES: Final = len(_STREAM_TYPE)

_START_BYTES: Final = 64
"""An answer shows within so many bytes that it is an event stream, whatever its type says."""

ERROR_BODY_S: Final = 2.0
"""Longest wait for the rest of an error answer that justifies another try."""

SILENT_S: Final = 5.0
"""An answer that has begun, of an instance that is down or whose port refuses, is broken off once no byte of it has
come for this time: its server may just be finishing."""


class Exchange:
    """Sink of one answer. ``done`` gets the result; the caller gives connection and downstream, and releases them.

    ``on_commit`` is called when the head is sent, and returns the fleet's fields for it; ``on_begin`` when the answer
    begins to be sent, and no other try follows. With ``hides_usage`` the client does not see a stream's usage event.
    With ``awaits_output`` nothing of the answer is sent before the first token, or before the whole of an answer that
    does not stream: until then another instance can answer, and a decoder that takes KV over may fail, or give the
    request back, after its head. With
    ``stops_at_mark`` the client's own stop string is the one by which a decoder does that: it means nothing then.
    ``port_refuses`` returns, without waiting, whether the port of an instance is known to
    refuse connections. ``relay`` passes on what needs no decision of a stream whose first token has come.
    """

    _progressed = False
    _head: AnswerHead | None = None
    _failing_status = False
    _readable = True
    """The answer is of a type that can be read here, and is not compressed; see ``may_be_no_answer``."""
    _event_stream = False
    _is_object = False
    """The answer is to be JSON: it is sent when it is whole, as another instance can answer until then."""
    _splitter: EventSplitter | None = None
    _only_comments = True
    """No event of the stream has come."""
    _held_bytes = 0
    _begun = False
    """A part of the answer was sent: no other instance can give it."""
    _usage: UsageRemover | None = None
    _reframe: Callable[[list[bytes]], bytes] | None = None
    """Body bytes in the client's framing, when it is not the instance's; None: spliced as they come."""
    _chunks = False
    """Chunks towards the client are made here."""
    _last_wire = b""
    _earlier_pieces: Sequence[bytes] = ()
    _last_bytes = 0
    """The last pieces have not more; their framing may be counted with them."""
    output_mark = EVENT_END
    """Events with output have this, from the first token on (``output_marks``)."""
    _outputs = 0
    """The events with output that have come."""
    _body_bytes = 0
    """Bytes of an answer that does not stream, as far as they were not held."""
    _scan: UsageScan | None = None
    """Finds the usage of such an answer."""

    def __init__(
        self,
        connection: UpstreamConnection,
        downstream: Downstream,
        times: ExchangeTimes,
        *,
        on_commit: Callable[[], list[Header]],
        on_begin: Callable[[], None],
        on_first_token: Callable[[], None],
        port_refuses: Callable[[str], bool],
        hides_usage: bool = False,
        awaits_output: bool = False,
        stops_at_mark: bool = False,
        relay: Relay | None = None,
    ) -> None:
        self.done: asyncio.Future[ExchangeResult] = connection.loop.create_future()
        self._connection = connection
        self._downstream = downstream
        self._times = times
        self._on_commit = on_commit
        self._on_begin = on_begin
        self._on_first_token = on_first_token
        self._last_progress_s = connection.loop.time()
        self._held: list[tuple[bytes, list[bytes]]] = []
        # A plain function, not a bound method: that would be a cycle, and every exchange work for the collector.
        self._receive: Callable[[Exchange, bytes, list[bytes]], None] = Exchange._hold_event
        self._port_refuses = port_refuses
        self._hides_usage = hides_usage
        self._awaits_output = awaits_output
        self._may_give_back = not stops_at_mark
        self._relay = relay
        self._last_pieces: list[bytes] = []
        """The last pieces of the body, behind the earlier ones. The earlier ones are dropped once the last ones are
        ``TAIL_BYTES`` long, so that both together are never shorter, and a piece costs nothing but its place in a list.
        """

    # the connection's side -----------------------------------------------------------------------------------
    def head_received(self, head: AnswerHead) -> None:
        self._head = head
        self._progressed = True
        content_type, encoding = head.index.get(b"content-type", b""), head.index.get(b"content-encoding", b"")
        self._readable = may_be_no_answer(content_type, encoding)
        self._is_object = head.status < 300 and self._downstream.path in OBJECT_PATHS
        if is_retried(head.status):
            self._failing_status = True
            self._last_progress_s = self._connection.loop.time()
            self._receive = Exchange._hold_error
        elif self._readable and content_type[:_STREAM_TYPE_BYTES].lower() == _STREAM_TYPE:
            self._receive_events()
        elif self._awaits_output or (self._is_object and self._readable):
            self._receive = Exchange._hold_plain
        else:
            self._receive = Exchange._begin_plain

    def _receive_events(self) -> None:
        self._event_stream = True
        self._splitter = EventSplitter(MAX_HELD_BYTES)
        self._receive = Exchange._hold_event

    @property
    def _is_disputed(self) -> bool:
        return self._head is not None and judge_status(self._head.status) is Verdict.DISPUTED

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        self._progressed = True
        if not complete:
            self._receive(self, wire, pieces)
            return
        if self._event_stream and self._ends_early(pieces):
            self._truncate(pieces)
        elif wire:
            self._receive(self, wire, pieces)
        if not self.done.done():
            self._complete()

    def failed(self, failure: InstanceFailure) -> None:
        if self._failing_status:
            self._fail_by_status(None)
        else:
            self._fail(failure)

    def probe(self) -> None:
        self._take_back()
        if not self.done.done() and self._between_events():
            self._downstream.write(self._framed(COMMENT))

    def cut_off(self, error: RouterError) -> None:
        head = self._head
        assert head is not None
        self._settle(ExchangeResult(head.status, cut_off=True))
        self._break_off(error)

    # the fleet's side ----------------------------------------------------------------------------------------
    def instance_lost(self, why: str) -> bool:
        """Give the instance up if the client has seen nothing; an answer that has begun may still finish."""
        if self._begun or self._failing_status or self.done.done():
            return False
        self._lose(why)
        return True

    def instance_down(self, why: str) -> None:
        if self.done.done() or not self._begun:
            return
        if self._measure_silence_s(self._connection.loop.time()) > self._patience_s:
            self._lose(why)

    def instance_leaves(self, why: str) -> None:
        self.leave(why, FailureKind.DRAINED)

    def leave(self, why: str, kind: FailureKind) -> None:
        """Give the instance up, as nothing of its answer was sent."""
        if not (self._begun or self._failing_status or self.done.done()):
            self._lose(why, kind)

    def _lose(self, why: str, kind: FailureKind = FailureKind.DOWN) -> None:
        self._take_back()
        if self.done.done():
            return
        self._connection.abort()
        self._fail(InstanceFailure(kind, why))

    # phases: each is a receiver of bytes ---------------------------------------------------------------------
    def _hold_error(self, wire: bytes, pieces: list[bytes]) -> None:
        """The body of an error answer that justifies a try elsewhere."""
        self._hold(wire, pieces)
        if self._held_bytes <= MAX_HELD_BYTES:
            return
        if self._is_disputed:  # it may well be the client's own: it is not kept from it for its size
            self._failing_status = False
            self._begin()
            self._receive = Exchange._pass
        else:
            self._fail_by_status(None)

    def _hold_event(self, wire: bytes, pieces: list[bytes]) -> None:
        """The start of a stream, until its first event is whole; of a decode leg's, until its first token has come."""
        self._hold(wire, pieces)
        events = self._split(pieces)
        if events is None:
            self._begin()
            self._first_token()
            return
        events = [event for event in events if not is_comment(event)]
        values, is_held = [*map(event_object, events)], self._awaits_output and self._held_bytes <= MAX_HELD_BYTES
        for event, value in zip(events if is_held else events[:1], values, strict=False):
            if (failure := failure_in(event, value, may_give_back=self._may_give_back)) is not None:
                self._fail_by_event(failure, event)
                return
        self._only_comments = self._only_comments and not events
        has_output = self._counts_first(events, values)
        if has_output or (not is_held and (events or self._held_bytes > MAX_HELD_BYTES)):
            self._begin()
            self._receive = Exchange._watch
            if has_output:
                self._first_token()
        elif self._only_comments and not self._connection.complete:
            self._pass_comments(wire, pieces)

    def _pass_comments(self, wire: bytes, pieces: list[bytes]) -> None:
        """Send the head and comments, where the framing lets the stream go on with the events of another instance."""
        head, splitter = self._head, self._splitter
        assert head is not None
        assert splitter is not None
        between_chunks = self._connection.between_chunks and wire.endswith(b"\r\n")
        if pieces and splitter.only_comments and (between_chunks or head.framing is _UNTIL_CLOSE):
            self._send_held()

    def _hold_plain(self, wire: bytes, pieces: list[bytes]) -> None:
        """An answer that does not stream, until it is whole."""
        held_bytes = self._held_bytes
        starts_as_json = held_bytes == 0 and bool(pieces) and pieces[0][:1] in JSON_STARTS
        self._held.append((wire, pieces))
        self._held_bytes = held_bytes + len(wire)
        may_be_events = not starts_as_json and held_bytes < _START_BYTES and not self._awaits_output
        if may_be_events and starts_events(self.held_body()):
            held, self._held, self._held_bytes = self._held, [], 0
            self._receive_events()
            for held_wire, held_pieces in held:
                self._receive(self, held_wire, held_pieces)
            return None
        if self._held_bytes > MAX_HELD_BYTES:
            if (failure := self._failure_of_held()) is not None:
                self._connection.abort()
                return self._fail_by_body(failure, None)
            begins_json = bool(pieces) and self._held[0][1][0][:1] in JSON_STARTS
            self._scan = UsageScan() if begins_json and self._readable else None
            for held_wire, held_pieces in self._held:
                self._count_bytes(held_wire, held_pieces)
            self._begin()
            self._receive = Exchange._pass_uncut_decoded if self._awaits_output else Exchange._pass_uncut
        return None

    def _count_bytes(self, wire: bytes, pieces: list[bytes]) -> None:
        self._body_bytes += len(wire)
        if self._scan is not None:
            for piece in pieces:
                self._scan.feed(piece)

    def _pass_uncut(self, wire: bytes, pieces: list[bytes]) -> None:
        """An answer that does not stream, and is too long to be held."""
        self._count_bytes(wire, pieces)
        self._pass(wire, pieces)

    def _pass_uncut_decoded(self, wire: bytes, pieces: list[bytes]) -> None:
        """Such an answer of a decoder."""
        self._count_bytes(wire, pieces)
        self._pass_unless_given_back(wire, pieces)

    def _failure_of_held(self, *, whole: bool = False) -> InstanceFailure | None:
        """The failure that the held body shows, or what has come of it."""
        head, body = self._head, self.held_body()
        assert head is not None
        if self._awaits_output and head.status < 400:
            may_give_back, failure = self._may_give_back, None
            if whole:
                failure = failure_of_whole(body, may_give_back=may_give_back)
            elif may_give_back and gives_back(body):
                failure = GIVEN_BACK
            if failure is not None:
                return failure
        return failure_of_object(body, readable=self._readable) if self._is_object else None

    def _begin_plain(self, wire: bytes, pieces: list[bytes]) -> None:
        self._hold(wire, pieces)
        if self._readable and pieces and pieces[0][:1] in JSON_STARTS:
            self._scan = UsageScan()
        self._count_bytes(wire, pieces)
        self._begin()
        self._receive = Exchange._pass_uncut

    def _watch(self, wire: bytes, pieces: list[bytes]) -> None:
        """A stream whose first token has not come."""
        self._pass(wire, pieces)
        events, self._outputs = self._split(pieces), 0
        if events is None:
            self._outputs = 1
            self._first_token()
        elif self._counts_first(events, [*map(event_object, events)]):
            self._first_token()

    def _counts_first(self, events: list[bytes], values: Sequence[Mapping[str, Any] | None]) -> bool:
        """Whether one of the events is the first one with output. What comes from there on is counted."""
        for at, found in enumerate(values):
            if starts_output(found):
                self.output_mark = output_mark(self._downstream.path, events[at])
                begun = b"" if self._splitter is None else self._splitter.rest
                self._outputs = first_outputs(self.output_mark, [*events[at:], begun])
                return True
        return False

    def _pass_unless_given_back(self, wire: bytes, pieces: list[bytes]) -> None:
        """An answer that its decoder gives back in mid-stream is not whole, though the stream ends as if it were."""
        if not self._tells_given_back(wire):
            return self._pass(wire, pieces)
        self._connection.abort()
        return self._fail(GIVEN_BACK)

    def _tells_given_back(self, wire: bytes) -> bool:
        """Whether the answer was given back, also where a part of the words came with the read before."""
        return self._may_give_back and gives_back(self._last_wire[-MARK_BYTES:] + wire)

    def _pass(self, wire: bytes, pieces: list[bytes]) -> None:
        self._downstream.write(wire if self._reframe is None else self._reframe(pieces))
        self._outputs += wire.count(self.output_mark)
        if self._last_wire[-1:] != b"\n":  # an event was cut in two
            self._outputs += cut_mark(self.output_mark, self._last_wire, wire)
        self._last_wire = wire
        self._last_pieces += pieces
        self._last_bytes = last_bytes = self._last_bytes + len(wire)
        if last_bytes >= TAIL_BYTES:
            self._let_go()

    # steps ---------------------------------------------------------------------------------------------------
    def _hold(self, wire: bytes, pieces: list[bytes]) -> None:
        self._held.append((wire, pieces))
        self._held_bytes += len(wire)

    def _let_go(self) -> None:
        """The last pieces become the earlier ones if they are long enough to be searched alone, and have events that
        are whole."""
        self._last_bytes = sum(map(len, self._last_pieces))
        if self._last_bytes < TAIL_BYTES or (self._event_stream and not self._has_whole_events()):
            return
        self._earlier_pieces, self._last_pieces, self._last_bytes = self._last_pieces, [], 0

    def _has_whole_events(self) -> bool:
        if self._last_bytes > MAX_LAST_EVENT_BYTES:
            return True
        data = b"".join(self._last_pieces)
        self._last_pieces = [data]
        return data.count(b"\n\n") >= _WHOLE_EVENTS or (
            b"\r" in data and len(SOME_EVENT_ENDS.findall(data)) >= _WHOLE_EVENTS
        )

    def held_body(self) -> bytes:
        held = self._held
        if len(held) == 1:
            pieces = held[0][1]
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return b"".join([piece for _, pieces in held for piece in pieces])

    def _split(self, pieces: list[bytes]) -> list[bytes] | None:
        """Events that are complete now; None when one is too long to be read, which shows that the prefill is over."""
        assert self._splitter is not None
        events = self._splitter.feed(b"".join(pieces))
        return None if self._splitter.too_long else events

    def _first_token(self) -> None:
        self._receive = Exchange._pass_unless_given_back if self._awaits_output else Exchange._pass
        self._splitter = None
        self._on_first_token()
        if self._relay is not None and not self._awaits_output:
            self._offer_to(self._relay)

    # the native relay ----------------------------------------------------------------------------------------
    def _offer_to(self, relay: Relay) -> None:
        head, connection, downstream = self._head, self._connection, self._downstream
        if head is None or head.framing is not _CHUNKED or connection.file < 0 or downstream.file < 0:
            return
        if not (downstream.http_10 or downstream.bodiless):
            connection.offer = RelayedAnswer(relay, self, connection, downstream)

    def _take_back(self) -> None:
        """Have the answer here again, if the relay has it."""
        if self._connection.lent_to is not None:
            self._connection.lent_to.take_back()

    def terms_of_relay(self, coming_bytes: int) -> tuple[int, int] | None:
        """Flags by which the relay is to pass on what comes next, and how much of it may be kept; None: not now."""
        usage = self._usage
        if self._receive is not Exchange._pass or self.done.done():
            return None
        if self._reframe is None:
            return (0, 0) if self._last_wire.endswith(b"\n\n\r\n") else None
        flags = EVENTS | _EVENTS_OF.get(self._downstream.path, 0)
        if usage is None:
            return flags, 0
        if not usage.idle:
            return None
        return flags | (0 if usage.sends_unrequested else HIDE_USAGE), 0

    def relayed(self, tail: bytes, log: bytes, outputs: int) -> None:
        """The relay has passed a part of the answer on, of which this is the end, and what was kept of it; so many of
        its events had output."""
        self._progressed = True
        self._outputs += outputs
        self._last_pieces.append(tail)
        self._last_bytes += len(tail)
        if self._last_bytes >= TAIL_BYTES:
            self._let_go()

    def _begin(self) -> None:
        """Send what was held. From here on there is no other try."""
        self._begun = True
        self._on_begin()
        self._send_held()

    def _send_held(self) -> None:
        """Send what was held, behind the head."""
        downstream = self._downstream
        committed = downstream.committed
        parts = [] if committed else [self._head_for_client()]
        held, self._held, self._held_bytes = self._held, [], 0
        for wire, pieces in held:
            parts.append(wire if self._reframe is None else self._reframe(pieces))
            self._last_wire = wire
            self._last_pieces += pieces
        (downstream.write if committed else downstream.write_head)(b"".join(parts))

    def _head_for_client(self) -> bytes:
        head, downstream = self._head, self._downstream
        assert head is not None
        fields = fields_for_client(head.fields, has_connection=b"connection" in head.index)
        fields += self._on_commit()
        fields += self._framing_fields(head)
        if not downstream.keeps_alive():
            fields.append((b"connection", b"close"))
        downstream.set_source(self._connection)
        return response_head(head.status, fields)

    def _framing_fields(self, head: AnswerHead) -> list[Header]:
        """The framing towards the client: the instance's own, unless one of the two cannot have it."""
        if head.framing is _LENGTH:
            return [(b"content-length", head.index.get(b"content-length", b"0"))]
        if head.framing is _EMPTY:
            return []
        read: Callable[[list[bytes]], bytes] = b"".join
        if self._hides_usage and self._event_stream:
            self._usage = UsageRemover()
            read = self._usage.feed
        if self._downstream.http_10:
            self._reframe = read
            return []
        if head.framing is _UNTIL_CLOSE or self._usage is not None:
            self._chunks = True
            self._reframe = chunker(read)
        return [(b"transfer-encoding", b"chunked")]

    # ends ----------------------------------------------------------------------------------------------------
    def _complete(self) -> None:
        head = self._head
        assert head is not None
        if self._failing_status:
            self._fail_by_status(self.held_body())
            return
        if not self._begun:
            if self._event_stream and (failed := self._failure_of_short_stream()) is not None:
                self._fail_by_event(*failed)
                return
            if not self._event_stream and (failure := self._failure_of_held(whole=True)) is not None:
                self._fail_by_body(failure, self.held_body())
                return
            self._begin()
        if self._usage is not None and (rest := self._usage.end()):
            self._downstream.write(as_chunk(rest) if self._chunks else rest)
        if self._chunks:
            self._downstream.write(b"0\r\n\r\n")
        ending = self._ending()
        # Usage is to stay in the instance's streams where it comes unasked, or could not be removed.
        unread = not (self._event_stream or self._readable)
        keeps_usage = unread if self._usage is None else self._usage.sends_unrequested
        self._settle(ExchangeResult(head.status, ending, sends_usage_unrequested=keeps_usage))

    def _ending(self) -> Ending:
        """The findings in what has come last."""
        if self._scan is not None:
            return ending_of(self._scan.usage)
        return read_ending(self._tail(), streamed=self._event_stream)

    def counted(self) -> Counted:
        """What has come of the answer so far, as far as it is no error."""
        head = self._head
        if head is None or head.status >= 400:
            return NOTHING_COUNTED
        if self._event_stream:
            return Counted(self._outputs)
        return Counted(0, self._body_bytes or sum(map(len, self._last_pieces)))

    def left(self) -> Ending:
        """The findings in what has come of an answer that is left before its end."""
        self._take_back()
        return self._ending() if self._event_stream else NO_ENDING

    def _failure_of_short_stream(self) -> tuple[InstanceFailure, bytes] | None:
        """The failure of a stream that is over before it has begun, and its last bytes; None where these should reach
        the client: what is no whole event may be meant for it."""
        assert self._splitter is not None
        rest = self._splitter.rest
        if self._awaits_output or self._splitter.only_comments:
            what = "token" if self._awaits_output else "event"
            return InstanceFailure(FailureKind.PROTOCOL, f"the stream ended before its first {what}"), b""
        failure = failure_in(rest, event_object(rest), may_give_back=self._may_give_back)
        return None if failure is None else (failure, rest)

    def _fail(self, failure: InstanceFailure, *, answer: ErrorAnswer | None = None, overdue: bool = False) -> None:
        self._take_back()
        if self.done.done():
            return
        if not self._connection.reusable:
            self._connection.abort()
        status = self._head.status if self._head is not None else 0
        # The exchange is settled first: breaking off closes the client's connection, which must not count as the
        # client's own.
        goes_on = self._downstream.committed and not self._begun
        self._settle(
            ExchangeResult(status, failure=failure, error_answer=answer, overdue=overdue, stream_goes_on=goes_on)
        )
        if self._begun:
            timed_out = failure.kind in (FailureKind.TIMEOUT, FailureKind.OVERDUE)
            error = (UpstreamTimeoutError if timed_out else UpstreamError)(f"the stream broke off: {failure.detail}")
            self._break_off(error)

    def _fail_by_status(self, body: bytes | None) -> None:
        """``body`` is the whole error body; None when it did not come whole."""
        head = self._head
        assert head is not None
        detail, pause_s = (body or b"")[:200].decode("utf-8", "replace"), None
        if judge_status(head.status, names_pause=True) is Verdict.BUSY:
            pause_s = retry_after_s(head.index.get(b"retry-after"), time.time())
        self._fail_by_body(InstanceFailure(FailureKind.STATUS, detail, head.status, pause_s), body)

    def _fail_by_body(self, failure: InstanceFailure, body: bytes | None) -> None:
        """``body``: the whole one, which the client gets if no other instance does better. Part of an answer under a
        status of success is none."""
        head = self._head
        assert head is not None
        if failure.kind is FailureKind.ABORTED:
            body = None
        answer = ErrorAnswer(head.status, fields_for_client(head.fields), body) if body is not None else None
        self._fail(failure, answer=answer)

    def _fail_by_event(self, failure: InstanceFailure, event: bytes) -> None:
        self._fail(failure, answer=error_of_event(failure, event))

    def _ends_early(self, pieces: list[bytes]) -> bool:
        """Whether the stream ends with these bytes, but not its answer."""
        if self._failing_status or self.done.done():
            return False
        return not ends_whole(self._downstream.path, [*self._tail(), self.held_body(), *pieces])

    def _truncate(self, pieces: list[bytes]) -> None:
        """Pass the last bytes on without the end of the framing, which would call the answer whole."""
        if self._begun and pieces:
            if self._reframe is not None:
                self._downstream.write(self._reframe(pieces))
            elif self._last_wire.endswith(b"\r\n"):  # between chunks
                self._last_wire = as_chunk(b"".join(pieces))
                self._downstream.write(self._last_wire)
            self._last_pieces += pieces
        self._fail(TRUNCATED)

    def _break_off(self, error: RouterError) -> None:
        """Let the client detect it: no end of the framing, and in a stream an error event where one fits."""
        words = b""
        if self._between_events():
            held = b"" if self._usage is None else self._usage.held
            words = self._framed(held + last_words(self._downstream.path, error, b"".join(self._tail())))
        self._downstream.break_off(words)

    def _between_events(self) -> bool:
        if self._usage is not None:
            return self._usage.between_events
        return self._event_stream and ends_event(b"".join(self._tail()))

    def _framed(self, event: bytes) -> bytes:
        """``event`` as the client's framing wants it; empty where it would land inside of a chunk, or of a length."""
        if self._head is not None and self._head.framing is _LENGTH:
            return b""
        if self._downstream.http_10:
            return event
        if self._chunks or (self._connection.between_chunks and self._last_wire.endswith(b"\r\n")):
            return as_chunk(event)
        return b""

    def _tail(self) -> list[bytes]:
        """The last pieces of the body, ``TAIL_BYTES`` or more."""
        return [*self._earlier_pieces, *self._last_pieces] if self._earlier_pieces else self._last_pieces

    def _settle(self, result: ExchangeResult) -> None:
        if not self.done.done():
            self.done.set_result(result)

    # deadlines -----------------------------------------------------------------------------------------------
    def check_deadlines(self, now_s: float) -> None:
        """Compare the waits for the instance with their limits. A client that reads slowly is not the
        instance's delay."""
        times = self._times
        if self._failing_status:
            if now_s - self._last_progress_s > ERROR_BODY_S:
                self._connection.abort()
                self._fail_by_status(None)
            return
        if now_s > times.deadline_s:
            detail = "the time for the whole request is over (router.total_timeout_s)"
            self._fail(InstanceFailure(FailureKind.OVERDUE, detail), overdue=True)
            return
        silent_s = self._measure_silence_s(now_s)
        if self._begun and silent_s > self._patience_s and self._port_refuses(self._connection.url):
            self._lose("the instance has closed its port and fallen silent")
        elif (failure := times.judge(silent_s, begun=self._begun)) is not None:
            self._fail(failure)

    @property
    def _patience_s(self) -> float:
        """The silence after which an answer is given up whose instance is down, or whose port refuses."""
        return SILENT_S

    def _measure_silence_s(self, now_s: float) -> float:
        """Time since the answer's last progress, to the interval of checks; 0 while the client is slower than the
        instance. Comments before the first event are none: a hung engine may have a front end that sends them."""
        connection = self._connection
        if connection.lent_to is not None and connection.lent_to.progressed():
            self._progressed = True
        if self._begun and (self._progressed or connection.paused):
            self._progressed = False
            self._last_progress_s = now_s
        return now_s - self._last_progress_s
