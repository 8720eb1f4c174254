"""A replica's evidence about the instances of a pool, and what follows from it for its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dualmap.scheduling.request.answers import Verdict
from dualmap.scheduling.request.breaker import BreakerRule
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.request.quarantine import Quarantine
from dualmap.scheduling.request.retry_budget import (
    CONTINUATION_SHARE,
    RETRIES_PER_S,
    RETRY_SHARE,
    RetryBudget,
)

_COMPLETED: Final = Outcome.COMPLETED
MOST_CONTINUATIONS: Final = 16_384.0
"""Continuations at once at most, where a replica has no limit of requests to take it from."""


@dataclass(slots=True)
class Evidence:
    """The two memories of failures, and the two budgets of further tries. Times are monotonic seconds."""

    breakers: CircuitBreakers = field(default_factory=lambda: CircuitBreakers(BreakerRule()))
    quarantine: Quarantine = field(default_factory=Quarantine)
    retries: RetryBudget = field(default_factory=lambda: RetryBudget(RETRY_SHARE, RETRIES_PER_S, 0.0))
    """The budget of the whole replica, over all its pools."""
    continuations: RetryBudget = field(
        default_factory=lambda: RetryBudget(CONTINUATION_SHARE, RETRIES_PER_S, 0.0, burst=MOST_CONTINUATIONS)
    )
    """The budget for the rest of answers that have begun, of the whole replica as well."""

    def take_retry(self, failure: InstanceFailure, now_s: float) -> bool:
        """Take a retry from the budget, which keeps a failing fleet from doing all work several times. It is not
        charged where no work was done: a dead instance may refuse its whole queue within a moment."""
        return not failure.wasted_work or self.retries.withdraw(now_s)

    def take_continuation(self, failure: InstanceFailure, now_s: float) -> bool:
        """Take the rest of an answer from the budget: an instance that dies may leave hundreds at once. What was meant
        to go elsewhere is not charged."""
        return failure.kind in (FailureKind.DRAINED, FailureKind.EVICTED) or self.continuations.withdraw(now_s)

    def began(self, instance_id: str, now_s: float) -> None:
        """The instance gave the first token of an answer, which may still break off."""
        self.quarantine.answered(instance_id, now_s)
        if self.breakers.troubled:
            self.breakers.began(instance_id, now_s)

    def ended(self, instance_id: str, outcome: Outcome, now_s: float) -> None:
        """A request ended on the instance that no failure was recorded of."""
        if outcome is _COMPLETED:
            self.breakers.succeeded(instance_id, now_s)
            self.quarantine.answered(instance_id, now_s)
        else:
            self.breakers.ended_without_evidence(instance_id, now_s)

    def failed(self, instance_id: str, failure: InstanceFailure, now_s: float) -> None:
        """Record that the instance failed a request, where no other answer is needed to judge it."""
        match failure.verdict:
            case Verdict.FAULT:
                self.breakers.failed(instance_id, failure, now_s)
            case Verdict.BUSY:
                self.breakers.busy(instance_id, failure.pause_s, now_s)
            case Verdict.BLAMELESS | Verdict.DISPUTED:
                self.breakers.ended_without_evidence(instance_id, now_s)

    def has_answered(self, instance_id: str, since_s: float) -> bool:
        """Whether the instance has given a first token, or a whole answer, since then."""
        return self.quarantine.has_answered(instance_id, since_s)

    def settle(self, disputed: Iterable[tuple[str, InstanceFailure]], now_s: float, *, answered: bool) -> None:
        """A request is over that these instances had failed in a disputed way; ``answered``: by an instance that did
        not do the same, so they are to blame."""
        for instance_id, failure in disputed:
            if answered:
                self.breakers.failed(instance_id, failure, now_s)
            else:
                self.breakers.ended_without_evidence(instance_id, now_s)

    def note_loss(
        self,
        instance_id: str,
        failure: InstanceFailure,
        prompt_hash: int | None,
        request_id: str,
        sent_s: float,
        now_s: float,
    ) -> None:
        """Report to the quarantine an instance that seems to have died, or cannot be reached. ``prompt_hash`` is None
        where the prompt cannot be to blame."""
        if failure.engine_died:
            self.quarantine.died(prompt_hash, instance_id, request_id, sent_s, now_s)
        elif failure.kind in (FailureKind.CONNECT, FailureKind.CLOSED):
            self.quarantine.unreachable(instance_id, now_s)

    def forget_all_but(self, instance_ids: Mapping[str, object]) -> None:
        """Drop what is kept about instances that left the fleet."""
        self.breakers.forget_all_but(instance_ids)
        self.quarantine.forget_all_but(instance_ids)
