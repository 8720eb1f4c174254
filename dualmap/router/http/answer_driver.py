"""A driver without a rule of an answer's life: it reports what a connection brings, and carries out the effects of the
machine.

An answer may pass the native relay: it is offered to that chunk by chunk, and given back. While the relay has it, the
transports of instance and client are as they were, but nothing is read from the one or written to the other. Code that
does either, or closes one of them, takes the answer back first.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from dualmap.router.answers.checks import retry_after_s
from dualmap.router.answers.failures import AnswerTimes
from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.answers.machine import (
    Abort,
    AnswerEffects,
    AnswerEvent,
    AnswerMachine,
    AnswerSpec,
    BreakOff,
    CheckCanContinue,
    CloseConnection,
    ConnectionFailed,
    CutOff,
    DownAndSilent,
    Finish,
    FirstTokenCame,
    GivenUpByFleet,
    Head,
    Lent,
    MayLeave,
    MustLeave,
    Relayed,
    Settle,
    Silent,
    TakeBack,
    Use,
    Write,
    WriteHead,
    WriteLast,
)
from dualmap.router.answers.result import AnswerResult
from dualmap.router.answers.sse import COMMENT, Ending
from dualmap.router.errors import RouterError
from dualmap.router.http.downstream import Downstream
from dualmap.router.http.heads import as_chunk
from dualmap.router.http.parts import Part
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.router.relay.relay import FULL, MAX_BYTES, TAKEN, Relay, Returned
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.values import value

_CHUNKED: Final = Framing.CHUNKED
_UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE
_LINE_END: Final = b"\r\n"
_FEW_CHUNKS: Final = 4
_MOST_SHORT_STAYS: Final = 8
"""An answer that has come back so often from the relay after a few chunks is not plain, and is not offered again."""
NO_TIMES: Final = AnswerTimes(float("inf"), float("inf"), float("inf"))
_INTERNAL: Final = AnswerSpec("", Use.INTERNAL)


def nothing() -> None: ...


async def _never() -> bool:
    return False


@value
class Receiver:
    """Who gets an answer."""

    part: Part
    """The part of the client's answer that this one is."""
    fields: Callable[[], list[Header]] = list
    """Makes the fleet's fields for the head."""
    begins: Callable[[], None] = nothing
    """Called when it begins to be sent, and no other try follows."""
    first_token: Callable[[], None] = nothing
    may_leave: Callable[[], Awaitable[bool]] = _never
    """Finds out whether another instance could go on with it as it is now."""


class AnswerDriver:
    """The sink of one connection's answer. ``done`` gets the result; the caller gives the connection, and releases it.

    Without a receiver nothing is written. ``port_refuses`` returns, without waiting, whether the port of an instance is
    known to refuse connections. ``relay`` passes on what needs no decision of a stream whose first token has come.
    """

    _write: Callable[[bytes], None] | None = None
    """Writes the next bytes, once the head is sent."""
    _head: AnswerHead | None = None
    _leaving: asyncio.Task[None] | None = None
    """Finds out whether the stream can leave its instance."""
    _key = 0
    """The key of the stay at the relay."""
    _short_stays = 0

    def __init__(
        self,
        connection: UpstreamConnection,
        spec: AnswerSpec = _INTERNAL,
        receiver: Receiver | None = None,
        times: AnswerTimes = NO_TIMES,
        *,
        port_refuses: Callable[[str], bool] | None = None,
        relay: Relay | None = None,
    ) -> None:
        self.done: asyncio.Future[AnswerResult] = connection.loop.create_future()
        self.connection = connection
        self._time = connection.loop.time
        self.machine = AnswerMachine(spec, self._time())
        self._receiver = receiver
        self._times = times
        self._port_refuses = port_refuses
        self._relay = relay

    # the connection's side -----------------------------------------------------------------------------------
    def head_received(self, head: AnswerHead) -> None:
        self._head, receiver = head, self._receiver
        bare = receiver is not None and receiver.part.strips(head)
        pause_s = retry_after_s(head.index.get(b"retry-after"), time.time()) if head.status >= 300 else None
        for effect in self.machine.on(Head(head, bare, pause_s), self._time()):
            _EFFECTS[type(effect)](self, effect)

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        machine = self.machine
        data = machine.take(wire, pieces, complete, self.connection.between_chunks)
        if data is None:
            for effect in machine.effects:
                _EFFECTS[type(effect)](self, effect)
        elif data and self._write is not None:
            self._write(data)

    def failed(self, failure: InstanceFailure) -> None:
        self.take_back()
        self._report(ConnectionFailed(failure))
        if self._receiver is None and not self.done.done():  # it was over when its client left
            self.done.set_result(AnswerResult(failure=failure))

    def probe(self) -> None:
        self.take_back()
        receiver = self._receiver
        if receiver is not None and self.machine.between_events and not self.machine.is_over:
            receiver.part.insert(COMMENT, between_chunks=self._is_between_chunks)

    def cut_off(self, error: RouterError) -> None:
        self._report(CutOff(error))

    def abort(self) -> None:
        self.connection.abort()

    # the fleet's side ----------------------------------------------------------------------------------------
    def instance_lost(self, why: str) -> bool:
        """Give the instance up if the client has seen nothing; an answer that has begun may still finish."""
        if self.machine.is_over:
            return False
        self._report(GivenUpByFleet(why))
        return self.machine.is_over

    def instance_down(self, why: str) -> None:
        self._report(DownAndSilent(why, self._measure_silence_s(self._time())))

    def instance_leaves(self, why: str) -> None:
        self.leave(why, FailureKind.DRAINED)

    def leave(self, why: str, kind: FailureKind) -> None:
        """Give the instance up, as far as that costs the client nothing."""
        self._report(MustLeave(why, kind))

    def check_deadlines(self, now_s: float) -> None:
        """Compare the waits for the instance with their limits. A client that reads slowly is not the instance's
        delay."""
        silent_s = self._measure_silence_s(now_s)
        refuses = (
            self._port_refuses is not None and self.machine.doubts(silent_s) and self._port_refuses(self.connection.url)
        )
        self._carry_out(self.machine.on(Silent(silent_s, self._times, refuses), now_s))

    def _measure_silence_s(self, now_s: float) -> float:
        relayed = self._relay is not None and self._key != 0 and self._relay.progressed(self._key)
        return self.machine.measure_silence_s(now_s, relayed=relayed, paused=self.connection.paused)

    # the client has left ---------------------------------------------------------------------------------------
    def go_on_alone(self) -> asyncio.Future[AnswerResult]:
        """Write nothing more. The result comes when the answer is over, or when a client would get the first of it."""
        self._receiver = self._write = None
        self.done = self.connection.loop.create_future()
        self.connection.redirect(self)
        return self.done

    def so_far(self) -> Ending:
        """The findings in what has come of an answer that is left before its end."""
        self.take_back()
        return self.machine.so_far()

    # effects -------------------------------------------------------------------------------------------------
    def _report(self, event: AnswerEvent) -> None:
        self._carry_out(self.machine.on(event, self._time()))

    def _carry_out(self, effects: AnswerEffects) -> None:
        for effect in effects:
            _EFFECTS[type(effect)](self, effect)

    def _write_head(self, effect: WriteHead) -> None:
        receiver, write, head = self._receiver, self._write, self._head
        if receiver is None:
            if effect.begins and head is not None and not self.done.done():  # it goes on alone
                self.done.set_result(AnswerResult(head.status))
            return
        if effect.begins:
            receiver.begins()
        if write is not None:
            if effect.data:
                write(effect.data)
        elif head is not None:
            bare = self.machine.is_bare
            self._write = receiver.part.send(head, receiver.fields, effect.data, bare, self.connection)

    def _write_next(self, effect: Write) -> None:
        if self._write is not None:
            self._write(effect.data)

    def _write_last(self, effect: WriteLast) -> None:
        if self._write is None or not effect.data:
            return
        if self.machine.is_bare:
            self._write(effect.data)
        elif self._ends_line and self._head is not None and self._head.framing is _CHUNKED:
            self._write(as_chunk(effect.data))

    def _first_token(self, effect: FirstTokenCame) -> None:
        receiver, connection = self._receiver, self.connection
        if receiver is None:
            return
        receiver.first_token()
        if effect.may_lend and self._relay is not None and connection.file >= 0 and receiver.part.file >= 0:
            head = self._head
            if head is not None and head.framing is _CHUNKED:
                connection.offer = self

    def _close(self, _: CloseConnection) -> None:
        if not self.connection.reusable:
            self.connection.abort()

    def _abort(self, _: Abort) -> None:
        self.connection.abort()

    def _finish(self, effect: Finish) -> None:
        if self._receiver is not None:
            self._receiver.part.end()
        if not self.done.done():
            self.done.set_result(effect.result)

    def _settle(self, effect: Settle) -> None:
        if not self.done.done():
            self.done.set_result(effect.result)

    def _break_off(self, effect: BreakOff) -> None:
        if self._receiver is not None:
            self._receiver.part.break_off(effect.words, between_chunks=self._is_between_chunks)

    @property
    def _ends_line(self) -> bool:
        """Whether the bytes that passed last, as they came, end a line of the framing."""
        return self.machine.last_wire.endswith(_LINE_END)

    @property
    def _is_between_chunks(self) -> bool:
        return self.connection.between_chunks and self._ends_line

    def _check_can_continue(self, effect: CheckCanContinue) -> None:
        if self._leaving is None and self._receiver is not None:
            self._leaving = self.connection.loop.create_task(self._find_out(self._receiver, effect))

    async def _find_out(self, receiver: Receiver, check: CheckCanContinue) -> None:
        """Report that another instance can go on with the stream. Else it stays, and is tested again at the next
        check."""
        try:
            if await receiver.may_leave():
                self._report(MayLeave(check.why, check.kind))
        finally:
            self._leaving = None

    # the native relay ----------------------------------------------------------------------------------------
    def take(self, data: bytes) -> bool:
        """Whether the relay takes the answer, from these bytes on, which begin a chunk."""
        receiver, relay, connection = self._receiver, self._relay, self.connection
        if receiver is None or relay is None or len(data) > MAX_BYTES or not receiver.part.client.may_lend():
            return False
        terms = self.machine.relay_terms(len(data))
        if terms is None:
            return False
        flags, log_limit = terms
        key = relay.attach(self, connection.file, receiver.part.client.file, flags, log_limit, data, self.machine.mark)
        if not key:
            self._count_stay(0)
            return False
        self._key = key
        self.machine.on(Lent(), self._time())
        connection.lend(self)
        receiver.part.client.lend(self)
        return True

    def take_back(self) -> None:
        """Go on without the relay, from where it is."""
        if self._relay is not None and self._key and (stream := self._relay.take(self._key)) is not None:
            self.given_back(stream._replace(reason=TAKEN))  # for any reason: it is not offered again at once

    def _take_back(self, effect: TakeBack) -> None:
        self.take_back()
        self._report(effect.event)

    def end(self) -> None:
        """The answer ends with what has passed; what has not is dropped."""
        if self._relay is not None and self._key and (stream := self._relay.take(self._key)) is not None:
            self._end_stay(stream)

    def drop(self) -> None:
        """The answer is over, and nothing of it is needed any more."""
        if self._relay is not None and self._key and self._relay.take(self._key) is not None:
            self._end_loan()
            self._report(Relayed(b"", b"", 0))

    def given_back(self, stream: Returned) -> None:
        self._end_stay(stream)
        self._count_stay(stream.chunks)
        error = OSError(stream.errno, os.strerror(stream.errno)) if stream.errno else None
        self.connection.go_on(stream.unread, error, offers=stream.reason == FULL)

    def _end_stay(self, stream: Returned) -> None:
        """Take over what the relay has passed on, and send the client what is left of that."""
        client = self._end_loan()
        self.machine.on(Relayed(stream.tail, stream.log, stream.outputs), self._time())
        if stream.unsent and client is not None:
            client.write(stream.unsent)

    def _end_loan(self) -> Downstream | None:
        self._key = 0
        self.connection.end_loan()
        if self._receiver is None:
            return None
        client = self._receiver.part.client
        client.end_loan()
        return client

    def _count_stay(self, chunks: int) -> None:
        if chunks < _FEW_CHUNKS:
            self._short_stays += 1
            if self._short_stays >= _MOST_SHORT_STAYS:
                self.connection.offer = None


_EFFECTS: Final[Mapping[type[Any], Callable[[AnswerDriver, Any], None]]] = {
    WriteHead: AnswerDriver._write_head,
    Write: AnswerDriver._write_next,
    WriteLast: AnswerDriver._write_last,
    Finish: AnswerDriver._finish,
    FirstTokenCame: AnswerDriver._first_token,
    TakeBack: AnswerDriver._take_back,
    Abort: AnswerDriver._abort,
    CloseConnection: AnswerDriver._close,
    Settle: AnswerDriver._settle,
    BreakOff: AnswerDriver._break_off,
    CheckCanContinue: AnswerDriver._check_can_continue,
}
