"""The signs that an instance failed an answer: in an event, in a whole body, in its silence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dualmap.router.answers.checks import ABORTED
from dualmap.router.answers.fields import is_aborted, is_given_back, response_of
from dualmap.router.answers.head import ErrorAnswer
from dualmap.router.answers.sse import error_status, event_data, json_object
from dualmap.scheduling.request.answers import Verdict, judge_status
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.values import value

_ANSWER: Final = Verdict.BLAMELESS

GIVEN_BACK: Final = InstanceFailure(FailureKind.RECOMPUTED, "the decoder ran out of memory (stop_reason: recomputed)")
_WORD: Final = b'"recomputed"'
MARK_BYTES: Final = 64
"""Longest text that marks an answer as given back."""
_GIVEN_BACK: Final = re.compile(rb'"stop_reason"\s*:\s*' + _WORD)


def is_retried(status: int) -> bool:
    """True for a status that justifies a try on another instance."""
    return judge_status(status) is not _ANSWER


def gives_back(data: bytes) -> bool:
    """Whether bytes of a stream of a decoder, which repeats nothing of its request, say that it gives the answer back;
    they may be a part of an event."""
    return _WORD in data and _GIVEN_BACK.search(data) is not None


def failure_of_whole(body: bytes, *, may_give_back: bool = True) -> InstanceFailure | None:
    """The failure that the whole answer of a leg shows: it is none, or gives the request back."""
    if b'"choices"' not in body:
        what = body[:200].decode("utf-8", "replace") if body.strip() else "an empty answer"
        return InstanceFailure(FailureKind.PROTOCOL, what)
    return GIVEN_BACK if may_give_back and _WORD in body and is_given_back(json_object(body) or {}) else None


def failure_in(event: bytes, value: Mapping[str, Any] | None, *, may_give_back: bool = True) -> InstanceFailure | None:
    """The failure that a first event, which carries ``value``, announces; None for one that should reach the client.
    ``may_give_back``: a decoder answers, and what it says of the request's return is not a stop string of the client's.

    An error with a code of a client error is passed on, as a plain answer of that status is.
    """
    if value is None:
        return None
    if may_give_back and is_given_back(value):
        return GIVEN_BACK
    if is_aborted(value):
        return ABORTED
    if response := response_of(value):
        return _failure_of_response(event, response)
    status = error_status(value)
    if status is None or not is_retried(status):
        return None
    return InstanceFailure(FailureKind.STATUS, event[:200].decode("utf-8", "replace"), status)


def _failure_of_response(event: bytes, response: Mapping[str, Any]) -> InstanceFailure | None:
    """The failure that an event of a response shows: it failed by the fault of its instance."""
    status, error = response.get("status"), response.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    if status != "failed" or code not in (None, "server_error"):
        return None
    return InstanceFailure(FailureKind.STATUS, event[:200].decode("utf-8", "replace"), 500)


def error_of_event(failure: InstanceFailure, event: bytes) -> ErrorAnswer | None:
    """The answer that an event with an error stands for; None where it carries no status."""
    if failure.status is None:
        return None
    return ErrorAnswer(failure.status, [(b"content-type", b"application/json")], event_data(event))


@value
class AnswerTimes:
    """Deadlines of one answer, by the driver's clock."""

    first_byte_s: float
    chunk_s: float
    deadline_s: float
    """Absolute: when the whole request is over."""
    kv_s: float | None = None
    """Time within which KV of another instance must have come, as the first token shows."""

    def judge(self, silent_s: float, *, begun: bool) -> InstanceFailure | None:
        """The failure of an answer that has been silent for so long; ``begun``: a part of it was sent."""
        if not begun and self.kv_s is not None and silent_s > self.kv_s:
            return stuck_transfer(self.kv_s)
        limit_s = self.chunk_s if begun else self.first_byte_s
        if silent_s <= limit_s:
            return None
        what, setting = ("further chunk", "chunk") if begun else ("first byte", "first_byte")
        detail = f"no {what} within {limit_s:g} s (router.{setting}_timeout_s)"
        return InstanceFailure(FailureKind.TIMEOUT, detail)


OVERDUE: Final = InstanceFailure(FailureKind.OVERDUE, "the time for the whole request is over (router.total_timeout_s)")


def stuck_transfer(limit_s: float) -> InstanceFailure:
    """KV of another instance did not come within ``limit_s``."""
    advice = "check that instances reach each other's KV connectors, or raise pools.transfer_timeout_s"
    return InstanceFailure(FailureKind.TRANSFER, f"no first token within {limit_s:g} s, which waits for KV; {advice}")


def never_asked(limit_s: float) -> InstanceFailure:
    """A decoder that goes first did not ask for its KV within ``limit_s``."""
    advice = "check that it reaches the metaserver of the router, or raise pools.transfer_timeout_s"
    return InstanceFailure(FailureKind.TRANSFER, f"the decoder asked for no KV within {limit_s:g} s; {advice}")
