"""Circuit breaker of one instance as one replica sees it: pure values, no clock.

Only server faults open it: errors of the connection, time-outs, answers of 500 and above except 501 and 505, which
every instance would give. Those and answers of 4xx are caused by the client; they show that the instance is alive and
count as neither success nor fault.

Transitions are one table; a missing entry is an error of the caller. Counting and cooling are guards that
choose the event:

    closed ── FAULT_LIMIT ──▶ open ── COOLED ──▶ half-open ── SUCCESS ──▶ closed
                               ▲                     │
                               └───── FAULT ─────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from scheduling.backoff import backoff_s
from scheduling.errors import TransitionError

SERVER_FAULT_STATUS = 500
NOT_IMPLEMENTED_STATUS = frozenset({501, 505})
"""The request asks for what no server of this kind does."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(StrEnum):
    SUCCESS = "success"
    """The instance answered as it should."""
    FAULT = "fault"
    """The instance failed, fewer times in a row than the limit."""
    FAULT_LIMIT = "fault_limit"
    """The instance failed as many times in a row as the limit."""
    COOLED = "cooled"
    """The cool-down is over and a request is to be sent."""
    NEUTRAL = "neutral"
    """The try ended without evidence: a client error, or the client left."""


_S, _E = BreakerState, BreakerEvent
TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (_S.CLOSED, _E.SUCCESS): _S.CLOSED,
    (_S.CLOSED, _E.FAULT): _S.CLOSED,
    (_S.CLOSED, _E.FAULT_LIMIT): _S.OPEN,
    (_S.CLOSED, _E.NEUTRAL): _S.CLOSED,
    # Requests sent before the breaker opened still end; that says nothing new about the instance.
    (_S.OPEN, _E.SUCCESS): _S.OPEN,
    (_S.OPEN, _E.FAULT): _S.OPEN,
    (_S.OPEN, _E.FAULT_LIMIT): _S.OPEN,
    (_S.OPEN, _E.NEUTRAL): _S.OPEN,
    (_S.OPEN, _E.COOLED): _S.HALF_OPEN,
    # The first request to end decides, usually the probe. Which request it was is not kept: a success of any shows
    # that the instance answers, and a fault of another than the probe costs one more cool-down.
    (_S.HALF_OPEN, _E.SUCCESS): _S.CLOSED,
    (_S.HALF_OPEN, _E.FAULT): _S.OPEN,
    (_S.HALF_OPEN, _E.FAULT_LIMIT): _S.OPEN,
    (_S.HALF_OPEN, _E.NEUTRAL): _S.HALF_OPEN,
    # A probe that never reported back: after another cool-down another request may try.
    (_S.HALF_OPEN, _E.COOLED): _S.HALF_OPEN,
}


@dataclass(frozen=True, slots=True)
class BreakerRule:
    fault_limit: int = 5
    """Faults in a row that open the breaker."""
    cooldown_s: float = 5.0
    """Time until the first probe; doubles with every probe that fails."""
    max_cooldown_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """One instance's breaker. Times are the caller's monotonic seconds."""

    state: BreakerState = BreakerState.CLOSED
    faults: int = 0
    """Faults in a row while closed."""
    failed_probes: int = 0
    retry_at_s: float = 0.0
    """Not closed: when the next probe may be sent."""

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        return self.state is BreakerState.CLOSED or now_s >= self.retry_at_s

    def sending(self, now_s: float, rule: BreakerRule) -> Breaker:
        """The breaker once a request is being sent: unless closed, that request is the one probe.

        Raises:
            TransitionError: the breaker does not allow it now.
        """
        if self.state is BreakerState.CLOSED:
            return self
        if not self.allows(now_s):
            raise TransitionError(f"the breaker is {self.state} for another {self.retry_at_s - now_s:.1f} s")
        return replace(self._to(BreakerEvent.COOLED), retry_at_s=now_s + rule.cooldown_s)

    def succeeded(self) -> Breaker:
        """After an answer that shows that the instance is healthy."""
        return Breaker() if self._to(BreakerEvent.SUCCESS).state is BreakerState.CLOSED else self

    def ended_without_evidence(self, now_s: float) -> Breaker:
        """After a client error or a client that left; a probe that ended so leaves its place to another."""
        after = self._to(BreakerEvent.NEUTRAL)
        return replace(after, retry_at_s=now_s) if after.state is BreakerState.HALF_OPEN else after

    def failed(self, now_s: float, rule: BreakerRule) -> Breaker:
        """After a server fault."""
        at_limit = self.faults + 1 >= rule.fault_limit
        after = self._to(BreakerEvent.FAULT_LIMIT if at_limit else BreakerEvent.FAULT)
        if after.state is BreakerState.CLOSED:
            return replace(after, faults=self.faults + 1)
        if self.state is BreakerState.OPEN:
            return self
        failed_probes = self.failed_probes + 1 if self.state is BreakerState.HALF_OPEN else 0
        cooldown_s = backoff_s(failed_probes + 1, first_s=rule.cooldown_s, longest_s=rule.max_cooldown_s)
        return replace(after, faults=0, failed_probes=failed_probes, retry_at_s=now_s + cooldown_s)

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


def is_server_fault(status: int | None) -> bool:
    """Whether an attempt with this status (None: no answer at all) speaks against the instance."""
    return status is None or (status >= SERVER_FAULT_STATUS and status not in NOT_IMPLEMENTED_STATUS)
