"""What a failure means for the request: the outcome to count, the error to answer with."""

from __future__ import annotations

import asyncio

from router.ask import FailureKind, InstanceFailure, Outcome
from router.errors import HoldTimeoutError, RouterError, UpstreamError, UpstreamTimeoutError


def exhausted(failure: InstanceFailure, why: str) -> RouterError:
    """The error for a client whose last try failed like this."""
    message = f"no instance could answer ({why}); the last one: {failure}"
    if failure.kind is FailureKind.TIMEOUT:
        return UpstreamTimeoutError(message, retry_after_s=1.0)
    return UpstreamError(message, retry_after_s=1.0)


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that ended in this exception before its first byte."""
    if isinstance(error, asyncio.CancelledError):
        return Outcome.CLIENT_GONE
    if isinstance(error, HoldTimeoutError | UpstreamTimeoutError):
        return Outcome.TIMED_OUT
    if isinstance(error, UpstreamError):
        return Outcome.UPSTREAM_FAILED
    return Outcome.REFUSED if isinstance(error, RouterError) else Outcome.INTERNAL_ERROR
