"""The life of one instance's answer to one request: one table of transitions, and what follows from each event.

Rules for this file:

- The machine does no I/O and reads no clock. A driver reports what came by ``on(event, now_s)``, and carries out the
  effects that it returns, in their order. HTTP drives it; the picker drives it, whose gateway passes the bytes; a leg
  without a client is the same machine, of which nothing is written.
- It is the only owner of where an answer is. What may be continued, what is an answer at all, what was counted of it,
  and how it ended, are functions of its values.
- ``TRANSITIONS`` says what is legal; whatever is missing there raises ``TransitionError``. An event that comes after
  the end is late news, and changes nothing.
- Until the first event or byte of the body has come nothing of the answer is sent, so every failure up to there costs
  the client nothing. Comments of a stream, by which an engine keeps the connection alive, are no part of the answer:
  they pass at once, behind the head, and another instance may still answer in the same stream. What is too long to be
  held passes unread.
- The bytes of the body are no event, and no object is made for them: ``take`` returns what the client gets for those of
  an answer that passes.
- Nothing here knows sockets, or how the client's bytes are framed.

Times are seconds of the driver's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final

from dualmap.router.answers.checks import (
    ABORTED,
    JSON_STARTS,
    OBJECT_PATHS,
    TRUNCATED,
    body_type,
    ends_whole,
    failure_of_object,
    shows_end,
    starts_events,
)
from dualmap.router.answers.failures import (
    GIVEN_BACK,
    MARK_BYTES,
    OVERDUE,
    AnswerTimes,
    error_of_event,
    failure_in,
    failure_of_whole,
    gives_back,
    is_retried,
)
from dualmap.router.answers.head import AnswerHead, ErrorAnswer, Framing
from dualmap.router.answers.kept_stream import KeptStream
from dualmap.router.answers.last_words import last_words
from dualmap.router.answers.output_marks import EVENT_END, cut_mark, first_outputs, output_mark
from dualmap.router.answers.result import AnswerResult
from dualmap.router.answers.sse import (
    NO_ENDING,
    Ending,
    EventSplitter,
    ending_of_stream,
    ending_of_whole,
    ends_event,
    event_object,
    is_comment,
    starts_output,
)
from dualmap.router.answers.tail import Tail
from dualmap.router.answers.usage_remover import UsageRemover
from dualmap.router.answers.usage_scan import UsageScan
from dualmap.router.errors import RouterError, UpstreamError, UpstreamTimeoutError
from dualmap.router.prompts.inference_request import MESSAGES_PATH, RESPONSES_PATH
from dualmap.router.relay.relay import EVENTS, HIDE_IDS, HIDE_USAGE, KEEP, MESSAGES, RESPONSES
from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.request.answers import Verdict, judge_status
from dualmap.scheduling.request.charge import NOTHING_COUNTED, Counted
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.values import value

MAX_HELD_BYTES: Final = 256 << 10
"""A first event, or the body of an error answer, is held back up to this."""
_START_BYTES: Final = 64
"""An answer that is an event stream under another type shows that within this many bytes."""
ERROR_BODY_S: Final = 2.0
"""Longest wait for the rest of an error answer that justifies another try."""
SILENT_S: Final = 5.0
"""An answer that has begun, of an instance that is down or whose port refuses, is broken off once no byte of it has
come for this time: its server may just be finishing."""
GOES_ON_AFTER_S: Final = 1.0
"""A stream that can go on elsewhere does so after this silence of an instance that is down, or whose port refuses."""
_EVENTS_OF: Final = {MESSAGES_PATH: MESSAGES, RESPONSES_PATH: RESPONSES}


class AnswerPhase(StrEnum):
    """Where an answer is."""

    AWAITING_HEAD = "awaiting_head"
    """Nothing of the answer has come."""
    HOLDING_ERROR = "holding_error"
    """The status justifies a try elsewhere. The body is held, in case no other instance does better."""
    HOLDING_EVENTS = "holding_events"
    """A stream, until its first event is whole; that of a decoder, until its first token has come."""
    HOLDING_WHOLE = "holding_whole"
    """An answer that does not stream, until it is whole: what it is shows then."""
    AWAITING_BODY = "awaiting_body"
    """The answer may be anything, and will pass as it comes; nothing of its body has come."""
    COLLECTING = "collecting"
    """No client gets it: its body is a part of the result."""
    WATCHING = "watching"
    """A stream that is being sent, and whose first token has not come."""
    PASSING = "passing"
    """A stream from its first token on."""
    LENT = "lent"
    """The native relay passes the stream on."""
    UNREAD = "unread"
    """The answer passes as it comes: it does not stream, and is too long to be held, or may be anything."""
    FAILED = "failed"
    """The instance failed, and the client has nothing of the answer: another instance may give it."""
    GOES_ON = "goes_on"
    """The instance failed, and another one may give the rest."""
    BROKEN_OFF = "broken_off"
    """The instance failed, or the replica stops, and the client has a part of the answer."""
    LEFT = "left"
    """Nothing more is seen of the answer: its client has left, or a gateway passes the rest."""
    DONE = "done"
    """All of the answer has come."""


class AnswerInput(StrEnum):
    """The inputs of the machine: the columns of ``TRANSITIONS``. An event is one of several inputs, by its content."""

    ERROR_HEAD = "error_head"
    EVENTS_HEAD = "events_head"
    WHOLE_HEAD = "whole_head"
    OTHER_HEAD = "other_head"
    """The head of an answer that may be anything."""
    COLLECTED = "collected"
    """The head of an answer that no client gets."""
    SHOWS_EVENTS = "shows_events"
    """The answer is an event stream under another type."""
    BEGAN = "began"
    """The first event came, and has no output; or the first bytes of what may be anything."""
    FIRST_TOKEN = "first_token"
    TOO_LONG = "too_long"
    """More has come than is held."""
    LENT = "lent"
    TAKEN_BACK = "taken_back"
    FAILED = "failed"
    CONTINUES = "continues"
    """The instance failed, or gives the answer up, and what the client has is kept."""
    BROKE_OFF = "broke_off"
    LEFT = "left"
    COMPLETED = "completed"


HOLDING: Final = frozenset({AnswerPhase.HOLDING_ERROR, AnswerPhase.HOLDING_EVENTS, AnswerPhase.HOLDING_WHOLE})
"""Nothing was sent but comments."""
BEGUN: Final = frozenset({AnswerPhase.WATCHING, AnswerPhase.PASSING, AnswerPhase.LENT, AnswerPhase.UNREAD})
"""A part of the answer was sent: no other instance can give it."""
PASSES: Final = frozenset({AnswerPhase.PASSING, AnswerPhase.UNREAD})
"""Bytes pass, if nothing is to be decided."""
ENDS: Final = frozenset(
    {AnswerPhase.FAILED, AnswerPhase.GOES_ON, AnswerPhase.BROKEN_OFF, AnswerPhase.LEFT, AnswerPhase.DONE}
)


def _transitions() -> dict[tuple[AnswerPhase, AnswerInput], AnswerPhase]:
    p, i = AnswerPhase, AnswerInput
    table = {
        (p.AWAITING_HEAD, i.ERROR_HEAD): p.HOLDING_ERROR,
        (p.AWAITING_HEAD, i.EVENTS_HEAD): p.HOLDING_EVENTS,
        (p.AWAITING_HEAD, i.WHOLE_HEAD): p.HOLDING_WHOLE,
        (p.AWAITING_HEAD, i.OTHER_HEAD): p.AWAITING_BODY,
        (p.AWAITING_HEAD, i.COLLECTED): p.COLLECTING,
        (p.HOLDING_WHOLE, i.SHOWS_EVENTS): p.HOLDING_EVENTS,
        (p.AWAITING_BODY, i.BEGAN): p.UNREAD,
        (p.HOLDING_WHOLE, i.TOO_LONG): p.UNREAD,
        (p.HOLDING_ERROR, i.TOO_LONG): p.UNREAD,
        (p.HOLDING_EVENTS, i.BEGAN): p.WATCHING,
        (p.HOLDING_EVENTS, i.FIRST_TOKEN): p.PASSING,
        (p.WATCHING, i.FIRST_TOKEN): p.PASSING,
        (p.PASSING, i.LENT): p.LENT,
        (p.LENT, i.TAKEN_BACK): p.PASSING,
    }
    for phase in (p.AWAITING_HEAD, p.AWAITING_BODY, p.COLLECTING, *HOLDING):
        table[phase, i.FAILED] = p.FAILED
    for phase in (p.AWAITING_BODY, p.COLLECTING, *HOLDING, p.WATCHING, p.PASSING, p.UNREAD):
        table[phase, i.COMPLETED] = p.DONE
    for phase in (p.WATCHING, p.PASSING):
        table[phase, i.CONTINUES] = p.GOES_ON
    for phase in (p.AWAITING_BODY, *HOLDING, p.WATCHING, p.PASSING, p.UNREAD):
        table[phase, i.BROKE_OFF] = p.BROKEN_OFF
    for phase in (p.AWAITING_HEAD, p.AWAITING_BODY, *HOLDING, p.WATCHING, p.PASSING, p.UNREAD):
        table[phase, i.LEFT] = p.LEFT
    return table


TRANSITIONS: Final[Mapping[tuple[AnswerPhase, AnswerInput], AnswerPhase]] = _transitions()
"""The phase after an input. A pair that is missing is illegal."""


class Use(StrEnum):
    """The purpose of an answer."""

    CLIENT = "client"
    """The answer goes to the client."""
    DECODED = "decoded"
    """The client gets it from a decoder, which may fail, or give the request back, after its head: nothing is sent
    before the first token, or before the whole of an answer that does not stream."""
    PREFILL = "prefill"
    """A prefill leg gives it: a part of the result."""
    INTERNAL = "internal"
    """The router itself requested it."""
    OBSERVED = "observed"
    """A gateway passes it on to the client as it comes."""


_FOR_NONE: Final = frozenset({Use.PREFILL, Use.INTERNAL})


@value
class AnswerSpec:
    """An answer as it is known before it comes."""

    path: str
    """Path of the API that answers."""
    use: Use = Use.CLIENT
    hides_usage: bool = False
    """The client is not to see a stream's usage event."""
    stops_at_mark: bool = False
    """The client's own stop string is the one by which a decoder gives a request back: it means nothing then."""
    keep: Callable[[], KeptStream] | None = None
    """Makes what keeps the stream, or watches it alone, once it is one; None: it passes as it comes."""


# events ----------------------------------------------------------------------------------------------------------
@value
class Head:
    """The head came."""

    head: AnswerHead
    bare: bool = False
    """The bytes have to pass without the instance's framing."""
    pause_s: float | None = None
    """The time after which its instance takes requests again, as it says (``retry-after``)."""


@value
class ConnectionFailed:
    """The instance, or the connection to it, failed."""

    failure: InstanceFailure


@value
class GivenUpByFleet:
    """The fleet gave the instance up. An answer that has begun may still finish."""

    why: str


@value
class DownAndSilent:
    """The instance is down, and nothing of the answer has come for a time (``measure_silence_s``)."""

    why: str
    silent_s: float


@value
class MustLeave:
    """The instance is not to have the answer any longer."""

    why: str
    kind: FailureKind


@value
class MayLeave:
    """Another instance could go on with the stream as it is now: the answer to ``CheckCanContinue``."""

    why: str
    kind: FailureKind


@value
class Silent:
    """Nothing of the answer has come for a time."""

    silent_s: float
    times: AnswerTimes
    port_refuses: bool
    """The port of its instance refuses connections."""


@value
class CutOff:
    """This replica ends an answer that has begun."""

    error: RouterError


@value
class GatewayDone:
    """Nothing more comes of one that a gateway passes on."""

    is_seen: bool = True
    """The body comes here, too."""
    is_whole: bool = False
    """The gateway has sent all of it."""


@value
class Lent:
    """The native relay passes it on from here on."""


@value
class Relayed:
    """The native relay has passed a part of it on, and gave it back."""

    tail: bytes
    """The end of that part."""
    log: bytes
    """The events that were kept of that part."""
    outputs: int
    """The number of its events with output."""


AnswerEvent = (
    Head
    | ConnectionFailed
    | GivenUpByFleet
    | DownAndSilent
    | MustLeave
    | MayLeave
    | Silent
    | CutOff
    | GatewayDone
    | Lent
    | Relayed
)


# effects ---------------------------------------------------------------------------------------------------------
@value
class WriteHead:
    """Write the head, unless that was done, and these bytes behind it."""

    data: bytes
    begins: bool = False
    """From here on no other instance can give it."""


@value
class Write:
    """Write the next bytes."""

    data: bytes


@value
class WriteLast:
    """Write the last bytes of an answer that is not whole, without the end of its framing."""

    data: bytes


@value
class FirstTokenCame:
    """The first token came."""

    may_lend: bool = False
    """The answer may be lent to the native relay from here on, wherever ``relay_terms`` says so."""


@value
class TakeBack:
    """Take the answer back from the native relay, and report the event once more."""

    event: AnswerEvent


@value
class Abort:
    """Close the connection to the instance."""


@value
class CloseConnection:
    """Close the connection to the instance, unless it may carry another request."""


@value
class Finish:
    """The answer is over, and whole: end its framing."""

    result: AnswerResult


@value
class Settle:
    """The answer is over, and not whole."""

    result: AnswerResult


@value
class BreakOff:
    """End the client's answer without the end that its framing announced: behind these events, where they fit."""

    words: bytes


@value
class CheckCanContinue:
    """Find out whether another instance could go on with the stream as it is now. Answer: ``MayLeave``, or none."""

    why: str
    kind: FailureKind


AnswerEffect = (
    WriteHead
    | Write
    | WriteLast
    | FirstTokenCame
    | TakeBack
    | Abort
    | CloseConnection
    | Finish
    | Settle
    | BreakOff
    | CheckCanContinue
)
AnswerEffects = Sequence[AnswerEffect]

# Members of enumerations that every answer meets, by names of this module: up to Python 3.11 an enumeration looks its
# member up in a way that costs as much as a call.
_AWAITING_HEAD: Final = AnswerPhase.AWAITING_HEAD
_HOLDING_ERROR: Final = AnswerPhase.HOLDING_ERROR
_HOLDING_WHOLE: Final = AnswerPhase.HOLDING_WHOLE
_AWAITING_BODY: Final = AnswerPhase.AWAITING_BODY
_COLLECTING: Final = AnswerPhase.COLLECTING
_PASSING: Final = AnswerPhase.PASSING
_LENT: Final = AnswerPhase.LENT
_ERROR_HEAD: Final = AnswerInput.ERROR_HEAD
_EVENTS_HEAD: Final = AnswerInput.EVENTS_HEAD
_WHOLE_HEAD: Final = AnswerInput.WHOLE_HEAD
_FIRST_TOKEN: Final = AnswerInput.FIRST_TOKEN
_COMPLETED: Final = AnswerInput.COMPLETED
_LENGTH: Final = Framing.LENGTH
_DECODED: Final = Use.DECODED
_OBSERVED: Final = Use.OBSERVED

_NOTHING: Final[AnswerEffects] = ()
_GOT_FIRST_TOKEN: Final = FirstTokenCame()
_MAY_BE_LENT: Final = FirstTokenCame(may_lend=True)
_ABORT: Final = Abort()
_CLOSE: Final = CloseConnection()
_TIMES_OUT: Final = (FailureKind.TIMEOUT, FailureKind.OVERDUE)


def _event_failure(may_give_back: bool, kept: KeptStream, event: bytes) -> InstanceFailure | None:
    """The failure for which an event is not passed on. Where no other instance goes on, an error event reaches the
    client as it came, and an abort does not: it looks like the end of a whole answer."""
    failure = failure_in(event, event_object(event), may_give_back=may_give_back)
    if failure is None or not kept.lost or failure is GIVEN_BACK:
        return failure
    return ABORTED if failure is ABORTED and not kept.is_ended_by_client() else None


# the machine -----------------------------------------------------------------------------------------------------
class AnswerMachine:
    """One answer."""

    kept: KeptStream | None = None
    """None: it is no stream, or not kept."""
    progressed = False
    """Bytes have come since its silence was measured."""
    last_wire = b""
    """The last bytes that passed, as they came."""
    mark = EVENT_END
    """Events with output have this, from the first token on (``output_marks``)."""
    _head: AnswerHead | None = None
    _pause_s: float | None = None
    is_bare = False
    """The bytes pass without the instance's framing."""
    effects: list[AnswerEffect]
    """The effects of the last event, or of the last bytes for which ``take`` returned None."""
    _readable = True
    """The body is of a type that can be read, and is not compressed; see ``body_type``."""
    is_events = False
    """The answer is a stream of events."""
    _splitter: EventSplitter | None = None
    _tail: Tail
    """The end of a stream, and of what passes unread."""
    _only_comments = True
    """No event of the stream has come."""
    _has_sent = False
    """The head was sent."""
    _held_bytes = 0
    _usage: UsageRemover | None = None
    _outputs = 0
    """The events with output that have come."""
    _body_bytes = 0
    """Bytes of an answer that does not stream, as far as they were passed on."""
    _scan: UsageScan | None = None
    """Finds the usage of such an answer that is too long to be held."""

    def __init__(self, spec: AnswerSpec, now_s: float) -> None:
        self.spec = spec
        self.phase = _AWAITING_HEAD
        self._progressed_s = now_s
        self._held: list[tuple[bytes, bytes]] = []
        self._waits = spec.use is _DECODED
        """Nothing is sent before the first token, or before the whole of an answer that does not stream."""
        self._may_give_back = not spec.stops_at_mark

    def on(self, event: AnswerEvent, now_s: float) -> AnswerEffects:
        """Take an event; returns what is to be done."""
        if self.phase in ENDS:
            return _NOTHING
        effects: list[AnswerEffect] = []
        self.effects = effects
        _HANDLERS[type(event)](self, event, now_s)
        return effects

    def take(
        self, wire: bytes, pieces: list[bytes], complete: bool = False, between_chunks: bool = False
    ) -> bytes | None:
        """Take the next bytes of the body. Returns what the client gets for them, where they just pass: as they came,
        or without their framing (``is_bare``). Returns None where ``effects`` say what is to be done.

        Args:
            wire: as they came, with their framing.
            pieces: the same without it.
            complete: they are the last ones.
            between_chunks: they end a chunk.
        """
        self.progressed = True
        data = b"".join(pieces)
        if complete or self.phase not in PASSES:
            self.effects = []
            if self.phase not in ENDS:
                self._receive(wire, data, complete, between_chunks)
            return None
        kept = self.kept
        if kept is not None:
            wire = data = kept.feed(data)
            if kept.failure is not None:
                self.effects = []
                self._fail_behind(wire, kept.failure, complete=False)
                return None
            if not wire:
                return wire
        return self._passed(wire, data)

    def _passed(self, wire: bytes, data: bytes) -> bytes | None:
        """Count the next bytes; returns what the client gets for them. None where a decoder gives the request back by
        them."""
        last, mark = self.last_wire, self.mark
        if self._waits and self._may_give_back and gives_back(last[-MARK_BYTES:] + wire):
            self.effects = [_ABORT]
            self._fail(GIVEN_BACK)
            return None
        if self.is_events:
            self._outputs += wire.count(mark)
            if last[-1:] != b"\n":  # an event was cut in two
                self._outputs += cut_mark(mark, last, wire)
        else:
            self._body_bytes += len(wire)
            if self._scan is not None:
                self._scan.feed(data)
        self.last_wire = wire
        self._tail.add(data)
        if self._usage is not None:
            return self._usage.feed(data)
        return data if self.is_bare else wire

    # what is known of it ---------------------------------------------------------------------------------------
    @property
    def has_begun(self) -> bool:
        """A part of the answer was sent: no other instance can give it."""
        return self.phase in BEGUN

    @property
    def is_over(self) -> bool:
        return self.phase in ENDS

    @property
    def can_go_on(self) -> bool:
        """Another instance could be asked for the rest."""
        kept = self.kept
        return kept is not None and not kept.lost and self.phase in BEGUN

    @property
    def between_events(self) -> bool:
        """Whether what was sent ends with an event."""
        if self._usage is not None:
            return self._usage.between_events
        return self.is_events and ends_event(self._tail.joined())

    @property
    def held_body(self) -> bytes:
        return b"".join([data for _, data in self._held])

    @property
    def shows_end(self) -> bool:
        """Whether the last event of a stream has come. Clients leave there, so the end of the body may not follow."""
        return self.is_events and shows_end(self.spec.path, self._tail.pieces)

    def counted(self) -> Counted:
        """The output that has come so far; none of an error."""
        head = self._head
        if head is None or head.status >= 400 or self.spec.use in _FOR_NONE:
            return NOTHING_COUNTED
        return Counted(self._outputs) if self.is_events else Counted(0, self._body_bytes)

    def so_far(self) -> Ending:
        """The findings in what has come of an answer that is left before its end."""
        return self._ending() if self.is_events else NO_ENDING

    def measure_silence_s(self, now_s: float, *, relayed: bool = False, paused: bool = False) -> float:
        """Time since its last progress, to the interval of these measurements; 0 while the client is slower than the
        instance. Comments before the first event are none: a hung engine may have a front end that sends them.

        Args:
            relayed: the native relay has passed bytes on since the last measurement.
            paused: the client takes nothing.
        """
        if self.has_begun and (self.progressed or relayed or paused):
            self.progressed = False
            self._progressed_s = now_s
        return now_s - self._progressed_s

    def doubts(self, silent_s: float) -> bool:
        """Whether it has begun and is silent for so long that the port of its instance is tested."""
        return self.has_begun and silent_s > self._patience_s

    def relay_terms(self, coming_bytes: int) -> tuple[int, int] | None:
        """Flags by which the native relay is to pass on what comes next, and how much of it may be kept; None: not
        now."""
        usage, kept = self._usage, self.kept
        if self.phase is not _PASSING:
            return None
        if not self.is_bare:
            return (0, 0) if self.last_wire.endswith(b"\n\n\r\n") else None
        flags = EVENTS | _EVENTS_OF.get(self.spec.path, 0)
        if usage is not None:
            if not usage.idle:
                return None
            flags |= 0 if usage.sends_unrequested else HIDE_USAGE
        if kept is None:
            return flags, 0
        if not kept.is_plain:
            return None
        flags |= HIDE_IDS if kept.hides_ids else 0
        if kept.lost:
            return flags, 0
        room = kept.log_room(coming_bytes)
        return (flags | KEEP, room) if room else None

    # events ----------------------------------------------------------------------------------------------------
    def _came(self, event: Head, now_s: float) -> None:
        head, spec = event.head, self.spec
        self._head, self.is_bare, use = head, event.bare, spec.use
        of, status = head.index.get, head.status
        self._readable, says_events = body_type(of(b"content-type"), of(b"content-encoding"))
        if status >= 300 and is_retried(status):
            self._progressed_s, self._pause_s = now_s, event.pause_s
            self._go(_ERROR_HEAD)
        elif use in _FOR_NONE:
            self._go(AnswerInput.COLLECTED)
        elif says_events:
            self._go(_EVENTS_HEAD)
            self._begin_events()
            if spec.keep is not None and head.framing is not _LENGTH:
                self._keep(spec.keep())
        elif self._waits or (self._readable and status < 300 and spec.path in OBJECT_PATHS):
            self._go(_WHOLE_HEAD)
        else:
            self._go(AnswerInput.OTHER_HEAD)
        if use is _OBSERVED:
            self._client_has_head()

    def _client_has_head(self) -> None:
        """A gateway has sent it. What does not stream comes with it."""
        if self.phase is _HOLDING_ERROR:
            self._fail_by_status(None)
        elif not self.is_events:
            self.effects.append(_GOT_FIRST_TOKEN)

    def _begin_events(self) -> None:
        self.is_events, self._splitter, self._tail = True, EventSplitter(MAX_HELD_BYTES), Tail(of_events=True)
        if self.spec.use is _OBSERVED:
            self._go(AnswerInput.BEGAN)

    def _keep(self, kept: KeptStream) -> None:
        self.kept, self.is_bare = kept, True
        if not self._waits:  # else all events are judged until the first token
            kept.watch = partial(_event_failure, self._may_give_back)

    def _fail_behind(self, data: bytes, failure: InstanceFailure, *, complete: bool) -> None:
        """An event, or the lack of one, has failed it; ``data`` came before. One that was given back is read to its
        end, which counts its tokens."""
        if data:
            _RECEIVERS[self.phase](self, data, data, False, True)
        if complete or failure is not GIVEN_BACK:
            self._fail(failure)

    def _connection_failed(self, event: ConnectionFailed, _: float) -> None:
        if self.phase is _HOLDING_ERROR:
            self._fail_by_status(None)
        elif self.phase is _LENT:
            self.effects.append(TakeBack(event))
        else:
            self._fail(event.failure)

    def _given_up_by_fleet(self, event: GivenUpByFleet, _: float) -> None:
        """Give the instance up if the client has seen nothing."""
        self._give_up(event.why, FailureKind.DOWN)

    def _give_up(self, why: str, kind: FailureKind) -> None:
        if not (self.has_begun or self.phase is _HOLDING_ERROR):
            self._lose(why, kind)

    def _down_and_silent(self, event: DownAndSilent, _: float) -> None:
        if self.has_begun and event.silent_s > self._patience_s:
            if self.phase is _LENT:
                self.effects.append(TakeBack(event))
            else:
                self._lose(event.why, FailureKind.DOWN)

    def _must_leave(self, event: MustLeave, _: float) -> None:
        """Give the instance up, if nothing of the answer was sent or another one could go on with it."""
        if not self.can_go_on or self.phase is AnswerPhase.WATCHING:
            self._give_up(event.why, event.kind)
        elif self.phase is _LENT:  # what the relay has kept of the stream counts
            self.effects.append(TakeBack(event))
        else:
            self.effects.append(CheckCanContinue(event.why, event.kind))

    def _may_leave(self, event: MayLeave, _: float) -> None:
        if self.phase is _LENT:
            self.effects.append(TakeBack(event))
        elif self.can_go_on:
            self._lose(event.why, event.kind)

    def _silent(self, event: Silent, now_s: float) -> None:
        silent_s, times = event.silent_s, event.times
        if self.phase is _HOLDING_ERROR:
            if now_s - self._progressed_s > ERROR_BODY_S:
                self.effects.append(_ABORT)
                self._fail_by_status(None)
            return
        overdue = now_s > times.deadline_s
        refused = not overdue and event.port_refuses and self.doubts(silent_s)
        failure = OVERDUE if overdue else None if refused else times.judge(silent_s, begun=self.has_begun)
        if not refused and failure is None:
            return
        if self.phase is _LENT:
            self.effects.append(TakeBack(event))
        elif failure is None:
            self._lose("the instance has closed its port and fallen silent", FailureKind.DOWN)
        else:
            self._fail(failure, overdue=overdue)

    def _cut_off(self, event: CutOff, _: float) -> None:
        head = self._head
        assert head is not None
        self._end(AnswerInput.BROKE_OFF, AnswerResult(head.status, began=True, ended_as=Outcome.CUT_OFF))
        self._break_off(event.error)

    def _gateway_done(self, event: GatewayDone, _: float) -> None:
        head = self._head
        if head is None:
            result = AnswerResult(ended_as=Outcome.CLIENT_GONE)
        elif head.status >= 400:
            result = AnswerResult(head.status, began=True)
        elif not event.is_seen:  # the head of an answer that does not stream comes with all of it
            result = AnswerResult(
                head.status, began=True, ended_as=Outcome.ENDED if self.is_events and not event.is_whole else None
            )
        elif self.shows_end:
            return self._complete()
        else:
            result = AnswerResult(head.status, self.so_far(), began=True, ended_as=Outcome.CLIENT_GONE)
        return self._end(AnswerInput.LEFT, result)

    def _was_lent(self, _: Lent, __: float) -> None:
        self._go(AnswerInput.LENT)

    def _relayed(self, event: Relayed, _: float) -> None:
        self._go(AnswerInput.TAKEN_BACK)
        self.progressed = True
        self._outputs += event.outputs
        self._tail.add(event.tail)
        if self.kept is not None:
            self.kept.take_log(event.log)

    # bytes -------------------------------------------------------------------------------------------
    def _receive(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        kept = self.kept
        if kept is not None:
            wire = data = kept.feed(data) if data else b""
            if complete and kept.failure is None:
                rest = kept.end()
                if self.can_go_on and self._ends_early(data + rest):  # what goes on begins with a whole event
                    return self._fail_behind(data, TRUNCATED, complete=True)
                wire = data = data + rest
            if kept.failure is not None:
                return self._fail_behind(data, kept.failure, complete=complete)
        if complete and self.is_events and self._ends_early(data):
            return self._truncate(data)
        if wire:
            _RECEIVERS[self.phase](self, wire, data, complete, between_chunks)
        if complete and self.phase not in ENDS:
            self._complete()
        return None

    def _hold(self, wire: bytes, data: bytes, complete: bool = False, between_chunks: bool = False) -> None:
        self._held.append((wire, data))
        self._held_bytes += len(wire)

    def _hold_error(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        """The body of an error answer that justifies a try elsewhere."""
        self._hold(wire, data)
        head = self._head
        assert head is not None
        if self._held_bytes <= MAX_HELD_BYTES:
            return
        if judge_status(head.status) is Verdict.DISPUTED:  # it may well be the client's own: its size is no reason
            self._pass_unread(False)
            self._begin(AnswerInput.TOO_LONG)
        else:
            self._fail_by_status(None)

    def _hold_events(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        """The start of a stream, until its first event is whole; of a decoder's, until its first token has come."""
        self._hold(wire, data)
        events = self._split(data)
        if events is None:
            self._begin(_FIRST_TOKEN)
            return self._got_first_token()
        events = [event for event in events if not is_comment(event)]
        values, is_held = [*map(event_object, events)], self._waits and self._held_bytes <= MAX_HELD_BYTES
        for event, found in zip(events if is_held else events[:1], values, strict=False):
            if (failure := failure_in(event, found, may_give_back=self._may_give_back)) is not None:
                return self._fail(failure, answer=error_of_event(failure, event))
        self._only_comments = self._only_comments and not events
        if self._counts_first(events, values):
            self._begin(_FIRST_TOKEN)
            self._got_first_token()
        elif not is_held and (events or self._held_bytes > MAX_HELD_BYTES):
            self._begin(AnswerInput.BEGAN)
        elif self._only_comments and not complete and (self.is_bare or (between_chunks and wire.endswith(b"\r\n"))):
            self._pass_comments(data)
        return None

    def _pass_comments(self, data: bytes) -> None:
        """Send the head and comments, where the stream can go on behind them with the events of another instance."""
        if data and self._splitter is not None and self._splitter.only_comments:
            self._send_held(begins=False)

    def _hold_whole(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        """An answer that does not stream, until it is whole."""
        held_bytes = self._held_bytes
        self._held.append((wire, data))
        self._held_bytes = count = held_bytes + len(wire)
        starts_as_json = held_bytes == 0 and data[:1] in JSON_STARTS
        if not starts_as_json and self._shows_events(held_bytes):
            held, self._held, self._held_bytes = self._held, [], 0
            self._go(AnswerInput.SHOWS_EVENTS)
            self._begin_events()
            for held_wire, held_data in held:
                _RECEIVERS[self.phase](self, held_wire, held_data, complete, between_chunks)
            return
        if count > MAX_HELD_BYTES:
            if (failure := self._failure_of_held(self.held_body, whole=False)) is not None:
                self.effects.append(_ABORT)
                self._fail_by_body(failure, None)
                return
            self._pass_unread(bool(data) and self._held[0][1][:1] in JSON_STARTS)
            self._begin(AnswerInput.TOO_LONG)

    def _shows_events(self, before_bytes: int) -> bool:
        return before_bytes < _START_BYTES and not self._waits and starts_events(self.held_body)

    def _begin_unread(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        """The first bytes of an answer that may be anything."""
        self._hold(wire, data)
        self._pass_unread(data[:1] in JSON_STARTS)
        self._begin(AnswerInput.BEGAN)

    def _pass_unread(self, is_json: bool) -> None:
        """Let the held part pass, and all that follows."""
        self._tail = Tail(of_events=False)
        self._scan = UsageScan() if is_json and self._readable else None
        for wire, data in self._held:
            self._body_bytes += len(wire)
            if self._scan is not None:
                self._scan.feed(data)

    def _watch(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        """A stream whose first token has not come."""
        self._pass(wire, data, complete, between_chunks)
        events, self._outputs = self._split(data), 0
        if events is None:
            self._outputs = 1
        elif not self._counts_first(events, [*map(event_object, events)]):
            return
        self._go(_FIRST_TOKEN)
        self._got_first_token()

    def _pass(self, wire: bytes, data: bytes, complete: bool, between_chunks: bool) -> None:
        if passed := self._passed(wire, data):
            self.effects.append(Write(passed))

    # steps -----------------------------------------------------------------------------------------------------
    def _go(self, given: AnswerInput) -> None:
        try:
            self.phase = TRANSITIONS[self.phase, given]
        except KeyError:
            raise TransitionError(f"{given} of an answer that is {self.phase}") from None

    def _split(self, data: bytes) -> list[bytes] | None:
        """Events that are complete now; None when one is too long to be read, which shows that the prefill is over."""
        assert self._splitter is not None
        events = self._splitter.feed(data)
        return None if self._splitter.too_long else events

    def _counts_first(self, events: list[bytes], values: Sequence[Mapping[str, Any] | None]) -> bool:
        """Whether one of the events is the first one with output. What comes from there on is counted."""
        for at, found in enumerate(values):
            if starts_output(found):
                self.mark = output_mark(self.spec.path, events[at])
                begun = b"" if self._splitter is None else self._splitter.rest
                self._outputs = first_outputs(self.mark, b"".join([*events[at:], begun]))
                return True
        return False

    def _got_first_token(self) -> None:
        self._splitter = None
        self.effects.append(_GOT_FIRST_TOKEN if self._waits else _MAY_BE_LENT)

    def _begin(self, given: AnswerInput) -> None:
        """Send what was held. From here on there is no other try."""
        self._go(given)
        self._send_held(begins=True)
        if (kept := self.kept) is not None:
            kept.watch = partial(_event_failure, self._may_give_back)

    def _send_held(self, *, begins: bool) -> None:
        """Send what was held, behind the head."""
        head, held = self._head, self._held
        assert head is not None
        self._held, self._held_bytes = [], 0
        if self.spec.hides_usage and self.is_events and not self._has_sent and head.framing is not _LENGTH:
            self._usage, self.is_bare = UsageRemover(), True
        self._has_sent = True
        sent, usage, bare, tail = b"", self._usage, self.is_bare, self._tail
        for wire, data in held:
            tail.add(data)
            sent += usage.feed(data) if usage is not None else data if bare else wire
            self.last_wire = wire
        self.effects.append(WriteHead(sent, begins))

    # ends ------------------------------------------------------------------------------------------------------
    def _complete(self) -> None:
        """All of the answer has come."""
        head, phase = self._head, self.phase
        assert head is not None
        if phase is _HOLDING_WHOLE or phase is _AWAITING_BODY:
            return self._complete_held(head)
        if phase not in BEGUN:
            if phase is _HOLDING_ERROR:
                return self._fail_by_status(self.held_body)
            if phase is _COLLECTING:
                return self._collected(head.status)
            if (failed := self._failure_of_short_stream()) is not None:
                return self._fail(failed[0], answer=error_of_event(*failed))
            self._send_held(begins=True)
        if self._usage is not None and (rest := self._usage.end()):
            self.effects.append(Write(rest))
        # Usage is to stay in the instance's streams where it comes unasked, or could not be removed.
        unread = not (self.is_events or self._readable)
        keeps_usage = unread if self._usage is None else self._usage.sends_unrequested
        return self._finish(AnswerResult(head.status, self._ending(), began=True, sends_usage_unrequested=keeps_usage))

    def _complete_held(self, head: AnswerHead) -> None:
        """All of an answer has come of which nothing was sent."""
        wires, pieces = zip(*self._held, strict=True) if self._held else ((), ())
        body = b"".join(pieces)
        if (failure := self._failure_of_held(body, whole=True)) is not None:
            return self._fail_by_body(failure, body)
        self._body_bytes = len(body)
        self.effects.append(WriteHead(body if self.is_bare else b"".join(wires), True))
        return self._finish(
            AnswerResult(head.status, began=True, whole=body, sends_usage_unrequested=not self._readable)
        )

    def _finish(self, result: AnswerResult) -> None:
        self._go(_COMPLETED)
        self.effects.append(Finish(result))

    def _collected(self, status: int) -> None:
        body = self.held_body
        if self.spec.use is Use.PREFILL and status < 400 and (failure := failure_of_whole(body)) is not None:
            return self._fail(failure)
        return self._finish(AnswerResult(status, body=body))

    def _ending(self) -> Ending:
        """The findings in what has come last."""
        if self._scan is not None:
            return Ending(self._scan.usage)
        return ending_of_stream(self._tail.pieces) if self.is_events else ending_of_whole(self._tail.joined())

    def _failure_of_held(self, body: bytes, *, whole: bool) -> InstanceFailure | None:
        """The failure that the held body shows, or what has come of it."""
        head = self._head
        assert head is not None
        if self._waits and head.status < 400:
            may_give_back, failure = self._may_give_back, None
            if whole:
                failure = failure_of_whole(body, may_give_back=may_give_back)
            elif may_give_back and gives_back(body):
                failure = GIVEN_BACK
            if failure is not None:
                return failure
        if head.status >= 300 or self.spec.path not in OBJECT_PATHS:
            return None
        return failure_of_object(body, readable=self._readable)

    def _failure_of_short_stream(self) -> tuple[InstanceFailure, bytes] | None:
        """The failure of a stream that is over before it has begun, and its last bytes; None where these should reach
        the client: what is no whole event may be meant for it."""
        assert self._splitter is not None
        rest = self._splitter.rest
        if self._waits or self._splitter.only_comments:
            what = "token" if self._waits else "event"
            return InstanceFailure(FailureKind.PROTOCOL, f"the stream ended before its first {what}"), b""
        failure = failure_in(rest, event_object(rest), may_give_back=self._may_give_back)
        return None if failure is None else (failure, rest)

    @property
    def _patience_s(self) -> float:
        """The silence after which it is given up if its instance is down, or its port refuses."""
        return GOES_ON_AFTER_S if self.can_go_on else SILENT_S

    def _lose(self, why: str, kind: FailureKind) -> None:
        self.effects.append(_ABORT)
        self._fail(InstanceFailure(kind, why))

    def _fail(self, failure: InstanceFailure, *, answer: ErrorAnswer | None = None, overdue: bool = False) -> None:
        if self.is_over:
            return
        status = self._head.status if self._head is not None else 0
        self.effects.append(_CLOSE)
        if not self.has_begun:
            goes_on = self._has_sent
            self._end(
                AnswerInput.FAILED,
                AnswerResult(
                    status,
                    failure=failure,
                    began=self.spec.use is _OBSERVED,
                    error_answer=answer,
                    overdue=overdue,
                    stream_goes_on=goes_on,
                ),
            )
        elif self.can_go_on and not overdue:
            if self._usage is not None and (held := self._usage.end()):
                self.effects.append(Write(held))
            self._end(AnswerInput.CONTINUES, AnswerResult(status, failure=failure, began=True, kept=self.kept))
        else:
            # It is settled first: breaking off closes the client's connection, which must not count as the client's.
            self._end(AnswerInput.BROKE_OFF, AnswerResult(status, failure=failure, began=True, overdue=overdue))
            error = UpstreamTimeoutError if failure.kind in _TIMES_OUT else UpstreamError
            self._break_off(error(f"the stream broke off: {failure.detail}"))

    def _fail_by_status(self, body: bytes | None) -> None:
        """``body`` is the whole error body; None when it did not come whole."""
        head = self._head
        assert head is not None
        detail = (body or b"")[:200].decode("utf-8", "replace")
        pause_s = self._pause_s if judge_status(head.status, names_pause=True) is Verdict.BUSY else None
        self._fail_by_body(InstanceFailure(FailureKind.STATUS, detail, head.status, pause_s), body)

    def _fail_by_body(self, failure: InstanceFailure, body: bytes | None) -> None:
        """``body``: the whole one, which the client gets if no other instance does better. Part of an answer under a
        status of success is none."""
        head = self._head
        assert head is not None
        if failure.kind is FailureKind.ABORTED:
            body = None
        self._fail(failure, answer=ErrorAnswer(head.status, head.fields, body) if body is not None else None)

    def _ends_early(self, data: bytes) -> bool:
        """Whether the stream ends with these bytes, but not its answer."""
        pieces = [*self._tail.pieces, data]
        if self._held:
            pieces.insert(-1, self.held_body)
        return not ends_whole(self.spec.path, pieces)

    def _truncate(self, data: bytes) -> None:
        """Pass the last bytes on without the end of the framing, which would call the answer whole."""
        if self.has_begun and data:
            self.effects.append(WriteLast(data if self._usage is None else self._usage.feed(data)))
            self._tail.add(data)
        self._fail(TRUNCATED)

    def _break_off(self, error: RouterError) -> None:
        """Let the client detect it: no end of the framing, and in a stream an error event where one fits."""
        words = b""
        if self.between_events:
            held = b"" if self._usage is None else self._usage.held
            words = held + last_words(self.spec.path, error, self._tail.joined())
        self.effects.append(BreakOff(words))

    def _end(self, given: AnswerInput, result: AnswerResult) -> None:
        self._go(given)
        self.effects.append(Settle(result))


_RECEIVERS: Final[Mapping[AnswerPhase, Callable[..., None]]] = {
    AnswerPhase.HOLDING_ERROR: AnswerMachine._hold_error,
    AnswerPhase.HOLDING_EVENTS: AnswerMachine._hold_events,
    AnswerPhase.HOLDING_WHOLE: AnswerMachine._hold_whole,
    AnswerPhase.COLLECTING: AnswerMachine._hold,
    AnswerPhase.WATCHING: AnswerMachine._watch,
    AnswerPhase.PASSING: AnswerMachine._pass,
    AnswerPhase.AWAITING_BODY: AnswerMachine._begin_unread,
    AnswerPhase.UNREAD: AnswerMachine._pass,
}
"""The methods that take bytes, by phase."""
assert _RECEIVERS.keys() == set(AnswerPhase) - ENDS - {AnswerPhase.AWAITING_HEAD, AnswerPhase.LENT}, (
    "bytes come in each of these phases"
)

_HANDLERS: Final[Mapping[type[Any], Callable[[AnswerMachine, Any, float], None]]] = {
    Head: AnswerMachine._came,
    ConnectionFailed: AnswerMachine._connection_failed,
    GivenUpByFleet: AnswerMachine._given_up_by_fleet,
    DownAndSilent: AnswerMachine._down_and_silent,
    MustLeave: AnswerMachine._must_leave,
    MayLeave: AnswerMachine._may_leave,
    Silent: AnswerMachine._silent,
    CutOff: AnswerMachine._cut_off,
    GatewayDone: AnswerMachine._gateway_done,
    Lent: AnswerMachine._was_lent,
    Relayed: AnswerMachine._relayed,
}
