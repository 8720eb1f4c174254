"""The life of an instance as the fleet sees it: one table of transitions.

Health checks report what the engine does; operators decide whether it serves. Health never returns an instance to
service that an operator took out: a draining instance stays draining while it is healthy, a parked one stays parked.
One that dies or hangs while draining is parked at once: it finishes nothing more, and must not come back by itself.

    starting ── HEALTHY ──▶ ready ── DRAIN ──▶ draining ── DRAINED, UNHEALTHY ──▶ standby
                            ▲   │                 │                                 │
                    HEALTHY │   │ UNHEALTHY       │ RESUME                          │ RESUME
                            └── down              └──▶ ready                        └──▶ starting

A ready instance whose engine was RESTARTED between two checks passes through starting, which forgets its KV metadata.
"""

from __future__ import annotations

from enum import StrEnum

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.state.instance import InstanceState


class InstanceEvent(StrEnum):
    HEALTHY = "healthy"
    """Enough checks in a row succeeded."""
    UNHEALTHY = "unhealthy"
    """Enough checks in a row failed, or it makes no progress."""
    RESTARTED = "restarted"
    """The instance is healthy, but its process is another one than at the last check; legal only where KV metadata is
    kept."""
    DRAIN = "drain"
    """Take no new requests, finish what is there."""
    DRAINED = "drained"
    """No request is queued or running any more."""
    RESUME = "resume"
    """Back into service."""
    PARK = "park"
    """An operator takes it out of service at once; legal only where no work is lost."""


SERVING = frozenset({InstanceState.READY, InstanceState.DRAINING})
"""States in which an instance works on dispatched requests; a draining one finishes what is queued on it."""

_S, _E = InstanceState, InstanceEvent
TRANSITIONS: dict[tuple[InstanceState, InstanceEvent], InstanceState] = {
    (_S.STARTING, _E.HEALTHY): _S.READY,
    (_S.STARTING, _E.UNHEALTHY): _S.STARTING,
    (_S.STARTING, _E.DRAIN): _S.STANDBY,
    (_S.STARTING, _E.RESUME): _S.STARTING,
    (_S.STARTING, _E.PARK): _S.STANDBY,
    (_S.READY, _E.HEALTHY): _S.READY,
    (_S.READY, _E.UNHEALTHY): _S.DOWN,
    (_S.READY, _E.RESTARTED): _S.STARTING,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.RESUME): _S.READY,
    (_S.DRAINING, _E.HEALTHY): _S.DRAINING,
    (_S.DRAINING, _E.UNHEALTHY): _S.STANDBY,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DRAINED): _S.STANDBY,
    (_S.DRAINING, _E.RESUME): _S.READY,
    (_S.DOWN, _E.HEALTHY): _S.READY,
    (_S.DOWN, _E.UNHEALTHY): _S.DOWN,
    (_S.DOWN, _E.DRAIN): _S.STANDBY,
    (_S.DOWN, _E.RESUME): _S.STARTING,
    (_S.DOWN, _E.PARK): _S.STANDBY,
    (_S.STANDBY, _E.HEALTHY): _S.STANDBY,
    (_S.STANDBY, _E.UNHEALTHY): _S.STANDBY,
    (_S.STANDBY, _E.DRAIN): _S.STANDBY,
    (_S.STANDBY, _E.RESUME): _S.STARTING,
    (_S.STANDBY, _E.PARK): _S.STANDBY,
}


def next_state(state: InstanceState, event: InstanceEvent) -> InstanceState:
    """The state after the event.

    Raises:
        TransitionError: the event is not legal in this state; the message says which are.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        legal = ", ".join(sorted(known for at, known in TRANSITIONS if at is state))
        raise TransitionError(f"an instance that is {state} cannot {event}; possible: {legal}") from None
