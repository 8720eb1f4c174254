"""The error that a client gets for a request that is not served, and how a request ended that ended in an exception."""

from __future__ import annotations

import asyncio
from typing import assert_never

from dualmap.router.errors import (
    HoldTimeoutError,
    InstanceStartingError,
    NoInstanceError,
    QueueFullError,
    RequestQuarantinedError,
    RouterError,
    SloUnreachableError,
    UpstreamError,
    UpstreamTimeoutError,
    no_instance,
)
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.tenants.rate_limits import over_limit
from dualmap.scheduling.request.machine import MAX_CONTINUATIONS, Refusal, Refuse, RequestMachine
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.statestore.errors import StoreError


def refusal(refuse: Refuse, machine: RequestMachine, pool: ServedPool) -> RouterError:
    """The error for the request's client, which says what can be done about it. The table in
    ``docs/reference/errors.md`` names the place that decides each of them."""
    failure, why = machine.failure, refuse.why
    match why:
        case Refusal.NO_INSTANCE:
            return no_instance(pool.settings.name, machine.stored_name())
        case Refusal.INSTANCE_REMOVED:
            return NoInstanceError("its instance was removed while the request was sent there", retry_after_s=1.0)
        case Refusal.NOT_STARTED | Refusal.TOO_MANY_WAIT:
            return _not_started(why, pool)
        case Refusal.LIMITED:
            return _limited(refuse, machine)
        case Refusal.QUARANTINED if failure is None:
            return _quarantined(refuse)
        case Refusal.QUEUE_FULL:
            return _queue_full(refuse, pool)
        case Refusal.WOULD_BE_LATE | Refusal.IS_LATE | Refusal.LATE_FOR_TOO_LONG:
            return _late(refuse, machine, pool)
        case Refusal.TOO_MANY_TURNS:
            return QueueFullError(
                "too many requests of this agent's run wait for memory already; wait for their answers, or give each"
                " agent a session id of its own",
                retry_after_s=1.0,
            )
        case Refusal.HELD_TOO_LONG if machine.turn is not None and not machine.searches:
            return HoldTimeoutError(
                f"other agents' runs needed the memory of pool {pool.settings.name!r} for the"
                f" {pool.scheduling.max_hold_s:g} s that a request is held at most; try again later, add instances, or"
                " raise scheduling.max_hold_s",
                retry_after_s=1.0,
            )
        case Refusal.HELD_TOO_LONG:
            return HoldTimeoutError(
                f"no instance had room within the {pool.scheduling.max_hold_s:g} s that a request is held at most; try"
                " again later, add instances, or raise scheduling.max_hold_s",
                retry_after_s=_expected_wait_s(machine, pool),
            )
        case Refusal.OVERDUE | Refusal.TOO_SLOW:
            return _too_late(why, _last_failure(machine))
        case (
            Refusal.QUARANTINED
            | Refusal.NOBODY_LEFT
            | Refusal.TRIES_SPENT
            | Refusal.CONTINUED_TOO_OFTEN
            | Refusal.BUDGET_SPENT
        ):
            return exhausted(_last_failure(machine), _why_no_other_try(why, machine.tries), machine.tries)
        case _:
            assert_never(why)


def _last_failure(machine: RequestMachine) -> InstanceFailure:
    assert machine.failure is not None, "only a request that an instance failed is refused for this"
    return machine.failure


def _limited(refuse: Refuse, machine: RequestMachine) -> RouterError:
    assert machine.spec.claim.draws is not None and refuse.failed is not None and refuse.failed.limited is not None
    return over_limit(machine.spec.claim.tenant, machine.spec.claim.draws, refuse.failed.limited)


def _quarantined(refuse: Refuse) -> RouterError:
    assert refuse.quarantined is not None
    return RequestQuarantinedError(
        f"{refuse.quarantined.deaths} engines died while they held this prompt: it is refused for a while",
        retry_after_s=refuse.quarantined.retry_after_s,
    )


def _queue_full(refuse: Refuse, pool: ServedPool) -> RouterError:
    assert refuse.failed is not None
    full = refuse.failed.full
    return QueueFullError(
        f"{', '.join(sorted(full))} of pool {pool.settings.name!r} hold as many requests as"
        " max_queued_requests of each allows; try again later, add instances, or raise max_queued_requests"
        " (pools[].instances, or PATCH /admin/instances/ID)",
        retry_after_s=max(1.0, min(map(pool.fleet.expected_wait_s, full))),
    )


def _not_started(why: Refusal, served: ServedPool) -> RouterError:
    pool, autoscale = served.settings.name, served.settings.autoscale
    assert autoscale is not None, "only a pool that scales may be without any instance"
    advice = "dualmap inspect scaling says how its start goes"
    if why is Refusal.TOO_MANY_WAIT:
        said = f"{autoscale.max_waiting} requests of this router wait for the first instance of pool {pool!r} already"
        advice += "; try again later, or raise pools[].autoscale.max_waiting"
    else:
        said = f"pool {pool!r} had no instance, and none became ready within {autoscale.gives_up_s:g} s"
        advice += "; try again later, and raise pools[].autoscale.start_s if instances take longer to start"
    return InstanceStartingError(f"{said}; {advice}", retry_after_s=autoscale.start_s)


def exhausted(failure: InstanceFailure, why: str, tries: int) -> RouterError:
    """The error for a client whose last try, of so many, failed like this."""
    message = f"no instance could answer ({why}); the last one: {failure}"
    if failure.kind in (FailureKind.TIMEOUT, FailureKind.TRANSFER):
        return UpstreamTimeoutError(message, retry_after_s=1.0)
    error = UpstreamError(message, retry_after_s=1.0)
    error.is_unreached = failure.kind is FailureKind.CONNECT and tries == 1
    return error


def _why_no_other_try(why: Refusal, tries: int) -> str:
    match why:
        case Refusal.QUARANTINED:
            return "engines died while they held it"
        case Refusal.BUDGET_SPENT:
            return "the retry budget is spent"
        case Refusal.TRIES_SPENT:
            return f"{tries} instances failed"
        case Refusal.CONTINUED_TOO_OFTEN:
            return f"the answer was continued {MAX_CONTINUATIONS} times, which is the limit"
        case _:
            return "no other instance is ready" if tries == 1 else "every ready instance failed"


def _too_late(why: Refusal, failure: InstanceFailure) -> RouterError:
    if why is Refusal.OVERDUE:
        return UpstreamTimeoutError(f"no instance answered in time: {failure.detail}")
    advice = "stream long answers, or raise the setting"
    return UpstreamTimeoutError(f"the instance did not answer in time: {failure.detail}; {advice}")


def _late(refuse: Refuse, machine: RequestMachine, pool: ServedPool) -> RouterError:
    slo_s, order = machine.spec.slo_s, pool.rules.order
    if refuse.failed is not None and refuse.failed.missed is not None:
        decision = refuse.failed.missed.decision
        return SloUnreachableError(
            f"the first token is expected after {decision.expected_ttft_s:.1f} s, past the target of {slo_s:g} s, and"
            " late requests are refused (router.late_requests: refuse); try again later, allow more time with"
            " x-slo-ttft-ms, or set router.late_requests to serve",
            retry_after_s=pool.fleet.expected_wait_s(decision.instance_id),
        )
    wait_s = _expected_wait_s(machine, pool)
    target = f"the first token cannot come within its target of {slo_s:g} s any more"
    if refuse.why is Refusal.IS_LATE:
        return SloUnreachableError(
            f"requests with less to compute went first, {target}, and late requests are refused"
            " (router.late_requests: refuse); try again later, allow more time with x-slo-ttft-ms, or set"
            " router.late_requests to serve",
            retry_after_s=wait_s,
        )
    return QueueFullError(
        f"{target}, and no instance was idle in the {order.max_deferred_s:g} s since, after which late requests are"
        " refused (scheduling.max_deferred_s); try again later, allow more time with x-slo-ttft-ms, add instances, or"
        " unset scheduling.max_deferred_s, so that late requests wait",
        retry_after_s=wait_s,
    )


def _expected_wait_s(machine: RequestMachine, pool: ServedPool) -> float:
    """The expected wait at the instance in whose queue the request was."""
    return 1.0 if machine.placed is None else pool.fleet.expected_wait_s(machine.placed.instance_id)


def outcome_of(error: BaseException) -> Outcome:
    """How a request ended that ended in this exception; a cancellation may carry ``CUT_OFF``. A refusal of the machine
    has ended it already, with an outcome of its own."""
    if isinstance(error, asyncio.CancelledError):
        return Outcome.CUT_OFF if Outcome.CUT_OFF in error.args else Outcome.CLIENT_GONE
    if isinstance(error, HoldTimeoutError | UpstreamTimeoutError):
        return Outcome.TIMED_OUT
    if isinstance(error, UpstreamError):
        return Outcome.UPSTREAM_FAILED
    return Outcome.REFUSED if isinstance(error, RouterError | StoreError) else Outcome.INTERNAL_ERROR
