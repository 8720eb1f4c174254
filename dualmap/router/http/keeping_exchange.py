"""An exchange that keeps what its client was sent of a stream, so that another instance can go on with it.

The stream passes by whole events. One that fails after it has begun is not broken off: its result has ``kept``, and the
client's stream stays open. A decoder of vLLM-Ascend that gives its request back in the middle is such a failure; its
stream is read to its end, which counts its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from dualmap.router.answers.checks import TRUNCATED
from dualmap.router.answers.kept_stream import KeptStream
from dualmap.router.answers.sse import event_object
from dualmap.router.http.exchange import Exchange
from dualmap.router.http.exchange_result import GIVEN_BACK, ErrorAnswer, ExchangeResult, failure_in
from dualmap.router.http.heads import Header, chunker
from dualmap.router.http.upstream import AnswerHead, Framing
from dualmap.router.relay.relay import HIDE_IDS, KEEP
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure

GOES_ON_AFTER_S: Final = 1.0
"""A stream that can go on elsewhere does so after this silence of an instance that is down, or whose port refuses."""


def _event_failure(may_give_back: bool, event: bytes) -> InstanceFailure | None:
    return failure_in(event, event_object(event), may_give_back=may_give_back)


class KeepingExchange(Exchange):
    """``keep`` makes what keeps the stream, once it is one. ``may_leave`` finds out whether another instance could go
    on with it as it is now."""

    _kept: KeptStream | None = None
    """None: the answer is no stream, or not kept."""
    _leaving: asyncio.Task[None] | None = None
    """Finds out whether the stream can leave its instance, which drains."""

    def __init__(
        self, *args: Any, keep: Callable[[], KeptStream], may_leave: Callable[[], Awaitable[bool]], **how: Any
    ) -> None:
        super().__init__(*args, **how)
        self._keep = keep
        self._may_leave = may_leave

    # the connection's side -----------------------------------------------------------------------------------
    def head_received(self, head: AnswerHead) -> None:
        super().head_received(head)
        if self._event_stream and head.framing is not Framing.LENGTH:
            self._kept = self._keep()
            if not self._awaits_output:  # else all events are judged until the first token
                self._kept.watch = partial(_event_failure, self._may_give_back)

    def body_received(self, wire: bytes, pieces: list[bytes], complete: bool) -> None:
        kept = self._kept
        if kept is None:
            return super().body_received(wire, pieces, complete)
        data = kept.feed(pieces) if pieces else b""
        if data and not complete and kept.failure is None:  # every chunk but the last
            self._progressed = True
            return self._receive(self, data, [data])
        if complete and kept.failure is None:
            rest = kept.end()
            if self._can_go_on and self._ends_early([data, rest]):  # what goes on begins with a whole event
                return self._failed_behind(data, TRUNCATED, complete=True)
            data += rest
        if kept.failure is not None:
            return self._failed_behind(data, kept.failure, complete=complete)
        if complete:
            return super().body_received(data, [data] if data else [], complete)
        self._progressed = True
        return None

    def _failed_behind(self, data: bytes, failure: InstanceFailure, *, complete: bool) -> None:
        """An event, or the lack of one, has failed the answer; ``data`` came before it. One that was given back is read
        to its end."""
        self._progressed = True
        if data:
            super().body_received(data, [data], False)
        if complete or failure is not GIVEN_BACK:
            self._fail(failure)

    def leave(self, why: str, kind: FailureKind) -> None:
        """Give the instance up, if nothing of its answer was sent or another one could go on with it."""
        if not self._can_go_on or self._splitter is not None:
            super().leave(why, kind)
        elif self._leaving is None and not self.done.done():
            self._leaving = self._connection.loop.create_task(self._leave(why, kind))

    async def _leave(self, why: str, kind: FailureKind) -> None:
        """Leave the instance if another one can go on with the stream. Else it stays, and is tested again at the next
        check."""
        self._take_back()  # what the relay has kept of the stream counts
        try:
            if await self._may_leave() and self._can_go_on and not self.done.done():
                self._lose(why, kind)
        finally:
            self._leaving = None

    @property
    def _patience_s(self) -> float:
        return GOES_ON_AFTER_S if self._can_go_on else super()._patience_s

    # the native relay ----------------------------------------------------------------------------------------
    def terms_of_relay(self, coming_bytes: int) -> tuple[int, int] | None:
        terms, kept = super().terms_of_relay(coming_bytes), self._kept
        if terms is None or kept is None:
            return terms
        if not kept.is_plain:
            return None
        flags = terms[0] | (HIDE_IDS if kept.hides_ids else 0)
        if kept.lost:
            return flags, 0
        room = kept.log_room(coming_bytes)
        return (flags | KEEP, room) if room else None

    def relayed(self, tail: bytes, log: bytes, outputs: int) -> None:
        super().relayed(tail, log, outputs)
        if self._kept is not None:
            self._kept.take_log(log)

    # steps ---------------------------------------------------------------------------------------------------
    @property
    def _can_go_on(self) -> bool:
        kept = self._kept
        return self._begun and kept is not None and not kept.lost

    def _begin(self) -> None:
        super()._begin()
        if self._kept is not None:
            self._kept.watch = None if self._kept.lost else partial(_event_failure, self._may_give_back)

    def _pass_comments(self, wire: bytes, pieces: list[bytes]) -> None:
        if self._kept is None:
            super()._pass_comments(wire, pieces)
        elif self._splitter is not None and self._splitter.only_comments:  # chunks towards the client are made here
            self._send_held()

    def _framing_fields(self, head: AnswerHead) -> list[Header]:
        fields = super()._framing_fields(head)
        if self._kept is not None and self._reframe is None:  # what came is not passed as it came
            self._chunks = True
            self._reframe = chunker(b"".join)
        return fields

    def _fail(self, failure: InstanceFailure, *, answer: ErrorAnswer | None = None, overdue: bool = False) -> None:
        self._take_back()
        if self.done.done():
            return None
        if overdue or not self._can_go_on:
            return super()._fail(failure, answer=answer, overdue=overdue)
        if not self._connection.reusable:
            self._connection.abort()
        if self._usage is not None and (held := self._usage.end()):
            self._downstream.write(self._framed(held))
        assert self._head is not None
        return self._settle(ExchangeResult(self._head.status, failure=failure, kept=self._kept))
