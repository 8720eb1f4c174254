"""What a failure means for the request: the outcome to count, the error to answer with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from dualmap.router.context import ReplicaContext
from dualmap.router.errors import (
    HoldTimeoutError,
    RequestQuarantinedError,
    RouterError,
    UpstreamError,
    UpstreamTimeoutError,
)
from dualmap.router.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.router.quarantine import Trial
from dualmap.router.served_pool import ServedPool
from dualmap.scheduling.request.answers import Verdict


class Retried(Protocol):
    """A request whose try has failed."""

    request_id: str
    pool: ServedPool
    trial: Trial | None
    sent_s: float
    """When its present try began."""

    @property
    def prompt_hash(self) -> int: ...


def note_loss(failure: InstanceFailure, request: Retried, instance_id: str) -> None:
    """Tell the quarantine of an instance that seems to have died, or cannot be reached."""
    quarantine = request.pool.quarantine
    if failure.engine_died:
        quarantine.died(request.prompt_hash, instance_id, request.request_id, request.sent_s)
    elif failure.kind in (FailureKind.CONNECT, FailureKind.CLOSED):
        quarantine.unreachable(instance_id)


def exhausted(failure: InstanceFailure, why: str) -> RouterError:
    """The error for a client whose last try failed like this."""
    message = f"no instance could answer ({why}); the last one: {failure}"
    if failure.kind in (FailureKind.TIMEOUT, FailureKind.TRANSFER):
        return UpstreamTimeoutError(message, retry_after_s=1.0)
    return UpstreamError(message, retry_after_s=1.0)


def nobody_left(failure: InstanceFailure, attempts: int) -> RouterError:
    """The error when no instance is ready beside those that failed the request, ``attempts`` of them."""
    return exhausted(failure, "no other instance is ready" if attempts == 1 else "every ready instance failed")


@dataclass(slots=True)
class Disputes:
    """Answers to one request that its instances are to blame for if another one answers it."""

    _raised: list[tuple[str, InstanceFailure]] = field(default_factory=list)

    def judge(self, pool: ServedPool, instance_id: str, failure: InstanceFailure, now_s: float) -> None:
        """Record what a failure shows of its instance, or keep it until the request ends."""
        breakers = pool.breakers
        match failure.verdict:
            case Verdict.FAULT:
                breakers.failed(instance_id, failure, now_s)
            case Verdict.BUSY:
                breakers.busy(instance_id, failure.pause_s, now_s)
            case Verdict.DISPUTED:
                self._raised.append((instance_id, failure))
            case Verdict.ANSWER:
                breakers.ended_without_evidence(instance_id, now_s)

    def settle(self, pool: ServedPool, now_s: float, *, answered: bool) -> None:
        """The request is over; ``answered``: by an instance that did not do the same."""
        raised, self._raised = self._raised, []
        for instance_id, failure in raised:
            if answered:
                pool.breakers.failed(instance_id, failure, now_s)
            else:
                pool.breakers.ended_without_evidence(instance_id, now_s)


async def spend_retry(
    failure: InstanceFailure, request: Retried, context: ReplicaContext, *, failed_id: str, attempts: int
) -> None:
    """Take another try from what the settings allow this request and the whole replica. If the engine of the instance
    that failed died, wait for the trial of another copy of the request, or become the trial.

    The replica's budget keeps a failing fleet from doing all work several times. It is not charged where no work was
    done: a dead instance may refuse its whole queue within a moment.

    Raises:
        RouterError: there is none left, or another engine has died of the request.
    """
    note_loss(failure, request, failed_id)
    end_trial(request, completed=False)
    if attempts >= context.settings.max_attempts:
        raise exhausted(failure, f"{attempts} instances failed")
    try:
        request.trial = await request.pool.quarantine.admit(request.prompt_hash)
    except RequestQuarantinedError as error:
        raise exhausted(failure, "engines died while they held it") from error
    if failure.wasted_work and not context.retries.withdraw(context.clock.monotonic_s()):
        raise exhausted(failure, "the retry budget is spent")


def end_trial(request: Retried, *, completed: bool) -> None:
    """The request's present try is over; repetitions change nothing."""
    trial, request.trial = request.trial, None
    if trial is not None:
        trial.end(completed=completed)


def outcome_after(failure: InstanceFailure, error: BaseException) -> Outcome:
    """How a request ended whose last failure has left it without another try, as ``error`` says."""
    refused = failure.verdict is Verdict.DISPUTED and failure.status is not None and 400 <= failure.status < 500
    return Outcome.CLIENT_ERROR if refused and isinstance(error, UpstreamError) else outcome_of(error)


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that ended in this exception before its first byte; a cancellation may carry ``CUT_OFF``."""
    if isinstance(error, asyncio.CancelledError):
        return Outcome.CUT_OFF if Outcome.CUT_OFF in error.args else Outcome.CLIENT_GONE
    if isinstance(error, HoldTimeoutError | UpstreamTimeoutError):
        return Outcome.TIMED_OUT
    if isinstance(error, UpstreamError):
        return Outcome.UPSTREAM_FAILED
    return Outcome.REFUSED if isinstance(error, RouterError) else Outcome.INTERNAL_ERROR
