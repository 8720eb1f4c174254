"""Ejection of one instance as one replica sees it: pure values, no clock.

A breaker is opened by faults in a row, or by a share of faults that stands out from the other instances'
(``scheduling.request.outlier``). Errors that the client causes show that the instance is alive and count as neither
success nor fault. Every further ejection lasts longer; one is forgiven for every while in service.

Transitions are one table; a missing entry is an error of the caller. Counting and cooling are guards that
choose the event:

    closed ── EJECTED ──▶ open ── COOLED ──▶ half-open ── PROVEN ──▶ closed
                           ▲                     │
                           └───── FAULT ─────────┘

While half-open an instance gets trial requests, a few at a time, and enough of them have to be answered whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dualmap.scheduling.backoff import backoff_s
from dualmap.scheduling.errors import TransitionError


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    SUCCESS = "success"
    """The instance gave a whole answer; half-open, more of them are needed."""
    PROVEN = "proven"
    """The instance gave the last whole answer that was needed."""
    FAULT = "fault"
    """The instance failed, and is not to be ejected for it."""
    EJECTED = "ejected"
    """The instance failed, and is to be ejected."""
    COOLED = "cooled"
    """The ejection is over and a request is to be sent."""
    NEUTRAL = "neutral"
    """The try ended without evidence: a client error, or the client left."""


_S, _E = BreakerState, BreakerEvent
TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_S.CLOSED, _E.SUCCESS): _S.CLOSED,
    (_S.CLOSED, _E.FAULT): _S.CLOSED,
    (_S.CLOSED, _E.EJECTED): _S.OPEN,
    (_S.CLOSED, _E.NEUTRAL): _S.CLOSED,
    # Requests sent before the breaker opened still end; that says nothing new about the instance.
    (_S.OPEN, _E.SUCCESS): _S.OPEN,
    (_S.OPEN, _E.FAULT): _S.OPEN,
    (_S.OPEN, _E.NEUTRAL): _S.OPEN,
    (_S.OPEN, _E.COOLED): _S.HALF_OPEN,
    # Requests that end decide, usually the trials. Which ones they were is not kept: a success of any shows that the
    # instance answers, and a fault of another than a trial costs one more ejection.
    (_S.HALF_OPEN, _E.SUCCESS): _S.HALF_OPEN,
    (_S.HALF_OPEN, _E.PROVEN): _S.CLOSED,
    (_S.HALF_OPEN, _E.FAULT): _S.OPEN,
    (_S.HALF_OPEN, _E.NEUTRAL): _S.HALF_OPEN,
    # A trial that never reported back: after another cool-down another request may try.
    (_S.HALF_OPEN, _E.COOLED): _S.HALF_OPEN,
}


@dataclass(frozen=True, slots=True)
class BreakerRule:
    fault_limit: int = 5
    """Faults in a row that are reason to eject."""
    cooldown_s: float = 5.0
    """Time until the first trial; doubles with every further ejection."""
    max_cooldown_s: float = 60.0
    trials: int = 3
    """Whole answers that an ejected instance has to give, and trial requests under way at most."""
    forgiving_s: float = 60.0
    """Time in service after which one former ejection is forgiven."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """One instance's breaker. Times are the caller's monotonic seconds."""

    state: BreakerState = BreakerState.CLOSED
    faults: int = 0
    """Faults in a row while closed."""
    ejections: int = 0
    """Ejections that are not forgiven yet."""
    retry_at_s: float = 0.0
    """Time of the next trial, unless the breaker is closed."""
    trials: int = 0
    """Half-open: trials sent."""
    proofs: int = 0
    """Half-open: whole answers."""
    closed_at_s: float = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        return self.state is BreakerState.CLOSED or now_s >= self.retry_at_s

    def is_new(self, now_s: float, rule: BreakerRule) -> bool:
        """Whether nothing is remembered that matters."""
        return self.state is BreakerState.CLOSED and self.faults == 0 and self._unforgiven(now_s, rule) == 0

    def sending(self, now_s: float, rule: BreakerRule) -> Breaker:
        """The breaker once a request is being sent: unless closed, that request is a trial.

        Raises:
            TransitionError: the breaker does not allow it now.
        """
        if self.state is BreakerState.CLOSED:
            return self
        if not self.allows(now_s):
            raise TransitionError(f"the breaker is {self.state} for another {self.retry_at_s - now_s:.1f} s")
        return replace(self._to(BreakerEvent.COOLED), retry_at_s=now_s + rule.cooldown_s, trials=self.trials + 1)

    def began(self, now_s: float, rule: BreakerRule) -> Breaker:
        """The breaker after a first token: another trial need not wait for the end of the answer."""
        if self.state is BreakerState.HALF_OPEN and self.trials < rule.trials:
            return replace(self, retry_at_s=now_s)
        return self

    def succeeded(self, now_s: float, rule: BreakerRule) -> Breaker:
        """The breaker after a whole answer."""
        if self.state is BreakerState.OPEN:
            return self._to(BreakerEvent.SUCCESS)
        if self.state is BreakerState.CLOSED:
            return replace(self._to(BreakerEvent.SUCCESS), faults=0)
        proofs = self.proofs + 1
        if proofs < rule.trials:
            return replace(self._to(BreakerEvent.SUCCESS), proofs=proofs, retry_at_s=now_s)
        proven = self._to(BreakerEvent.PROVEN)
        return Breaker(proven.state, ejections=self.ejections, closed_at_s=now_s)

    def ended_without_evidence(self, now_s: float) -> Breaker:
        """The breaker after a client error or a client that left; a trial that ended so leaves its place to another."""
        after = self._to(BreakerEvent.NEUTRAL)
        if after.state is BreakerState.HALF_OPEN:
            return replace(after, retry_at_s=now_s, trials=max(0, self.trials - 1))
        return after

    def failed(self, now_s: float, rule: BreakerRule, *, ejected: bool) -> Breaker:
        """The breaker after a fault; ``ejected``: while in service, it is reason to eject the instance."""
        if self.state is BreakerState.OPEN:
            return self._to(BreakerEvent.FAULT)
        if self.state is BreakerState.CLOSED and not ejected:
            return replace(self._to(BreakerEvent.FAULT), faults=self.faults + 1)
        closed = self.state is BreakerState.CLOSED
        after = self._to(BreakerEvent.EJECTED if closed else BreakerEvent.FAULT)
        ejections = self._unforgiven(now_s, rule) + 1
        ejected_s = backoff_s(ejections, first_s=rule.cooldown_s, longest_s=rule.max_cooldown_s)
        return Breaker(after.state, ejections=ejections, retry_at_s=now_s + ejected_s)

    def _unforgiven(self, now_s: float, rule: BreakerRule) -> int:
        if self.state is not BreakerState.CLOSED:
            return self.ejections
        return max(0, self.ejections - int((now_s - self.closed_at_s) / rule.forgiving_s))

    def _to(self, event: BreakerEvent) -> Breaker:
        return replace(self, state=next_state(self.state, event))


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """The state after the event.

    Raises:
        TransitionError: the event cannot happen in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise TransitionError(f"a breaker that is {state} cannot meet {event}") from None
