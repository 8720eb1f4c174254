"""How one instance's answer ended, and what that means for its request."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Final

from dualmap.router.answers.checks import ABORTED
from dualmap.router.answers.head import ErrorAnswer
from dualmap.router.answers.kept_stream import KeptStream
from dualmap.router.answers.sse import NO_ENDING, Ending, ending_of_whole
from dualmap.scheduling.request.answers import Verdict, is_server_fault
from dualmap.scheduling.request.outcome import ENGINE_DEATH, FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.values import value

_COMPLETED: Final = Outcome.COMPLETED
_TIMES_OUT: Final = (FailureKind.TIMEOUT, FailureKind.OVERDUE)


@value
class AnswerResult:
    """Without ``failure`` the answer is whole, and its client has it."""

    status: int = 0
    ending: Ending = NO_ENDING
    failure: InstanceFailure | None = None
    """Failure of the instance."""
    began: bool = False
    """The client has a part of the answer: no other instance can give it, but for its rest where it is ``kept``."""
    _: KW_ONLY
    error_answer: ErrorAnswer | None = None
    kept: KeptStream | None = None
    """A stream that failed after it had begun, and may go on, as it was kept; None: there is no such stream."""
    sends_usage_unrequested: bool = False
    """Whether the stream, whose usage was requested, shows that it would have had it anyway."""
    stream_goes_on: bool = False
    """The client has a head and comments alone: the next instance may try, and answers in the same stream."""
    overdue: bool = False
    """The time for the whole request is over: no other try."""
    ended_as: Outcome | None = None
    """The outcome, where neither its instance nor its end says that: its client has left, this replica stops and broke
    it off, or its body did not pass here."""
    body: bytes = b""
    """Body of an answer that no client gets."""
    whole: bytes = b""
    """Body of an answer that its client has, in which the usage is looked for when it is needed: not before the client
    has the answer."""

    def as_error(self) -> ErrorAnswer:
        """The refusal of a prefill leg."""
        return ErrorAnswer(self.status, [(b"content-type", b"application/json")], self.body)

    @property
    def usage(self) -> Usage | None:
        """The usage of the answer; None where its instance has reported none."""
        return ending_of_whole(self.whole).usage if self.whole else self.ending.usage

    @property
    def fault(self) -> InstanceFailure | None:
        """The fault of the instance, also where the answer ended as if it were whole."""
        ending = self.ending
        if self.failure is not None or ending.error_status is None:
            return self.failure
        if ending.aborted:
            return ABORTED
        detail = f"{ENGINE_DEATH} (an error event)" if ending.engine_died else "an error event in the stream"
        failure = InstanceFailure(FailureKind.STATUS, detail, ending.error_status)
        return failure if failure.verdict is Verdict.FAULT else None

    @property
    def is_aborted(self) -> bool:
        """The instance aborted it."""
        return (fault := self.fault) is not None and fault.kind is FailureKind.ABORTED

    @property
    def is_from_instance(self) -> bool:
        """The instance has answered, if only by a refusal."""
        return self.status > 0 and (self.failure is None or self.failure.kind is FailureKind.STATUS)

    @property
    def shows_whole_stream(self) -> bool:
        """The answer is no error, and came to its end."""
        return self.failure is None and self.status == 200 and self.ending.error_status is None

    @property
    def outcome(self) -> Outcome:
        """The outcome of a request that ends with this."""
        if self.ended_as is not None:
            return self.ended_as
        failure: InstanceFailure | None = self.failure
        if failure is not None:
            if self.began and failure.kind is FailureKind.STATUS and self.status >= 400:
                return outcome_of_error(self.status)  # its client has it
            return Outcome.TIMED_OUT if failure.kind in _TIMES_OUT else Outcome.UPSTREAM_FAILED
        status = self.ending.error_status or self.status
        return _COMPLETED if status < 400 else outcome_of_error(status)


class Refusals:
    """The errors of instances that were tried, one of which the client gets if no other instance answers."""

    _disputed: ErrorAnswer | None = None

    def take(self, result: AnswerResult) -> ErrorAnswer | None:
        """Return the instance's error that the client gets if none is tried after this result: its own, or that of an
        instance before it which said that the client is at fault."""
        refusal = result.error_answer or self._disputed
        if result.failure is not None and result.failure.verdict is Verdict.DISPUTED:
            self._disputed = refusal
        return refusal


def outcome_of_error(status: int) -> Outcome:
    """The outcome of a request that is answered with an error of this status."""
    return Outcome.UPSTREAM_FAILED if is_server_fault(status) else Outcome.CLIENT_ERROR
