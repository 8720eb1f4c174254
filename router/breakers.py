"""The circuit breakers of a pool's instances, as this replica sees them."""

from __future__ import annotations

from collections.abc import Mapping

from router.outcome import Outcome
from scheduling.breaker import Breaker, BreakerRule, BreakerState

_NONE: frozenset[str] = frozenset()
_CLOSED = Breaker()


class CircuitBreakers:
    """Keeps only the breakers of failing instances, so a healthy fleet costs a request nothing.

    Times are monotonic seconds.
    """

    def __init__(self, rule: BreakerRule) -> None:
        self._rule = rule
        self.troubled: dict[str, Breaker] = {}
        """Breakers that are not as good as new."""

    def blocked(self, now_s: float) -> frozenset[str]:
        """Instances that are sent nothing at this moment."""
        if not self.troubled:
            return _NONE
        return frozenset(name for name, breaker in self.troubled.items() if not breaker.allows(now_s))

    def sending(self, instance_id: str, now_s: float) -> None:
        """A request goes to the instance: if its breaker was open, this is the probe and the next one waits."""
        breaker = self.troubled.get(instance_id)
        # Not allowed happens when every candidate was blocked: then the request is sent against the breaker.
        if breaker is not None and breaker.allows(now_s):
            self.troubled[instance_id] = breaker.sending(now_s, self._rule)

    def succeeded(self, instance_id: str) -> None:
        if instance_id in self.troubled:
            self._keep(instance_id, self.troubled[instance_id].succeeded())

    def ended_without_evidence(self, instance_id: str, now_s: float) -> None:
        """A client error, or a client that left."""
        if instance_id in self.troubled:
            self._keep(instance_id, self.troubled[instance_id].ended_without_evidence(now_s))

    def failed(self, instance_id: str, now_s: float) -> None:
        self._keep(instance_id, self.troubled.get(instance_id, _CLOSED).failed(now_s, self._rule))

    def record(self, instance_id: str, outcome: Outcome, now_s: float) -> None:
        """Record how a dispatched request ended; a client that left or made an error counts neither way."""
        if outcome is Outcome.COMPLETED:
            self.succeeded(instance_id)
        elif outcome in (Outcome.UPSTREAM_FAILED, Outcome.TIMED_OUT):
            self.failed(instance_id, now_s)
        else:
            self.ended_without_evidence(instance_id, now_s)

    def forget_all_but(self, instance_ids: Mapping[str, object]) -> None:
        """Drop the breakers of instances that left the fleet."""
        for instance_id in self.troubled.keys() - instance_ids.keys():
            del self.troubled[instance_id]

    def states(self) -> dict[str, BreakerState]:
        """Breakers that are not closed."""
        return {
            name: breaker.state for name, breaker in self.troubled.items() if breaker.state is not BreakerState.CLOSED
        }

    def _keep(self, instance_id: str, breaker: Breaker) -> None:
        if breaker == _CLOSED:
            self.troubled.pop(instance_id, None)
        else:
            self.troubled[instance_id] = breaker
