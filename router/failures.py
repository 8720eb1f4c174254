"""What a failure means for the request: the outcome to count, the error to answer with."""

from __future__ import annotations

import asyncio

from router.context import ReplicaContext
from router.errors import HoldTimeoutError, RouterError, UpstreamError, UpstreamTimeoutError
from router.outcome import FailureKind, InstanceFailure, Outcome


def exhausted(failure: InstanceFailure, why: str) -> RouterError:
    """The error for a client whose last try failed like this."""
    message = f"no instance could answer ({why}); the last one: {failure}"
    if failure.kind is FailureKind.TIMEOUT:
        return UpstreamTimeoutError(message, retry_after_s=1.0)
    return UpstreamError(message, retry_after_s=1.0)


def nobody_left(failure: InstanceFailure, attempts: int) -> RouterError:
    """The error when no instance is ready beside those that failed the request, ``attempts`` of them."""
    return exhausted(failure, "no other instance is ready" if attempts == 1 else "every ready instance failed")


def spend_retry(failure: InstanceFailure, attempts: int, context: ReplicaContext) -> None:
    """Take another try out of what the settings allow a request and the replica as a whole.

    The replica's budget keeps a failing fleet from doing everything several times. Where nothing was done it is
    not asked: a dead instance may refuse its whole queue within a moment.

    Raises:
        RouterError: there is none left.
    """
    if attempts >= context.settings.max_attempts:
        raise exhausted(failure, f"{attempts} instances failed")
    if failure.wasted_work and not context.retries.withdraw(context.clock.monotonic_s()):
        raise exhausted(failure, "the retry budget is spent")


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that ended in this exception before its first byte; a cancellation may carry ``CUT_OFF``."""
    if isinstance(error, asyncio.CancelledError):
        return Outcome.CUT_OFF if Outcome.CUT_OFF in error.args else Outcome.CLIENT_GONE
    if isinstance(error, HoldTimeoutError | UpstreamTimeoutError):
        return Outcome.TIMED_OUT
    if isinstance(error, UpstreamError):
        return Outcome.UPSTREAM_FAILED
    return Outcome.REFUSED if isinstance(error, RouterError) else Outcome.INTERNAL_ERROR
