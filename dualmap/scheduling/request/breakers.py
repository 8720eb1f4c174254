"""Breakers for the instances of a pool that this replica avoids: ejected ones, and busy ones for the time that they
name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from dualmap.scheduling.request.answers import pause_s
from dualmap.scheduling.request.breaker import Breaker, BreakerRule, BreakerState
from dualmap.scheduling.request.outcome import InstanceFailure
from dualmap.scheduling.request.outlier import OutcomeWindow, OutlierRule, most_ejected, stands_out
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.values import value

_NONE: Final[frozenset[str]] = frozenset()
_CLOSED: Final = Breaker()

CONSECUTIVE: Final = "consecutive"
SHARE: Final = "share"
RULES: Final = (CONSECUTIVE, SHARE)
"""Reasons to eject an instance: faults in a row, or a share of faults that stands out."""


@value
class Avoided:
    """Why an instance gets no requests, or trial requests alone."""

    state: str
    """``open``, ``half_open`` or ``busy``."""
    reason: str
    for_s: float
    """Time until a request may be sent; 0: one may be sent now."""


class CircuitBreakers:
    """Judges instances by the outcomes of this replica's requests.

    A success costs a request one addition; only a fault is judged. Times are monotonic seconds.
    """

    def __init__(
        self,
        rule: BreakerRule,
        outlier_rule: OutlierRule | None = None,
        *,
        view: Callable[[], ClusterView] | None = None,
        on_fault: Callable[[str, str], None] = lambda instance_id, reason: None,
        on_ejection: Callable[[str, str], None] = lambda instance_id, rule: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``view`` bounds how many may be ejected; without it any number may be. ``on_fault`` gets every fault's
        reason, ``on_ejection`` the rule that an instance is ejected by, ``warn`` what an operator should know."""
        self._rule = rule
        self._outliers = outlier_rule if outlier_rule is not None else OutlierRule()
        self._view = view
        self._on_fault, self._on_ejection, self._warn = on_fault, on_ejection, warn
        self._window = OutcomeWindow(self._outliers)
        self._kept: dict[str, Breaker] = {}
        """Breakers that remember something."""
        self._reasons: dict[str, str] = {}
        """Why instances were ejected last."""
        self.troubled: dict[str, float] = {}
        """Instances that are to be avoided, with the time from which a request may be sent."""
        self._busy_until_s: dict[str, float] = {}

    # what may be sent where ------------------------------------------------------------------------------------
    def blocked(self, now_s: float) -> frozenset[str]:
        """Instances that are sent nothing at this moment; none is for being ejected while more are than may be."""
        if not self.troubled:
            return _NONE
        blocked = frozenset(name for name, until_s in self.troubled.items() if now_s < until_s)
        if blocked and self._panics():
            return frozenset(name for name in blocked if now_s < self._busy_until_s.get(name, -math.inf))
        return blocked

    def _panics(self) -> bool:
        """Whether more instances are ejected than may be, as others left service after they were."""
        return self._room() < 0

    def _room(self) -> int:
        """How many more instances may be ejected."""
        ejected = [name for name, breaker in self._kept.items() if breaker.state is not BreakerState.CLOSED]
        if self._view is None:
            return 1
        instances, ready = self._view().instances, self._view().ready
        ejected = [name for name in ejected if name in instances and instances[name].state is InstanceState.READY]
        return most_ejected(len(ready), self._outliers) - len(ejected)

    def sending(self, instance_id: str, now_s: float) -> None:
        """A request goes to the instance: if it was ejected, this is a trial."""
        breaker = self._kept.get(instance_id)
        # A request may be sent against the breaker: it happens when every candidate was blocked.
        if breaker is not None and breaker.allows(now_s):
            self._keep(instance_id, breaker.sending(now_s, self._rule), now_s)

    # what came of it -------------------------------------------------------------------------------------------
    def began(self, instance_id: str, now_s: float) -> None:
        """The first token of an answer, which may still break off."""
        breaker = self._kept.get(instance_id)
        if breaker is not None:
            self._keep(instance_id, breaker.began(now_s, self._rule), now_s)

    def succeeded(self, instance_id: str, now_s: float) -> None:
        """A whole answer."""
        self._window.add(instance_id, False, now_s)
        breaker = self._kept.get(instance_id, _CLOSED)
        if breaker is not _CLOSED or instance_id in self.troubled:
            after = breaker.succeeded(now_s, self._rule)
            self._keep(instance_id, after, now_s)
            if breaker.state is not after.state is BreakerState.CLOSED:
                self._warn(
                    f"instance {instance_id} is back in service: it answered {breaker.proofs + 1} trial requests"
                )

    def ended_without_evidence(self, instance_id: str, now_s: float) -> None:
        """A client error, or a client that left."""
        breaker = self._kept.get(instance_id)
        if breaker is not None:
            self._keep(instance_id, breaker.ended_without_evidence(now_s), now_s)

    def failed(self, instance_id: str, failure: InstanceFailure, now_s: float) -> None:
        """The instance is at fault: eject it if it has failed too often in a row, or stands out."""
        self._on_fault(instance_id, failure.reason)
        self._window.add(instance_id, True, now_s)
        breaker, rule = self._kept.get(instance_id, _CLOSED), self._rule
        own, peers = self._window.of(instance_id, now_s)
        by = None
        if breaker.state is BreakerState.HALF_OPEN or breaker.faults + 1 >= rule.fault_limit:
            by = CONSECUTIVE
        elif stands_out(own, peers, self._outliers):
            by = SHARE
        after = breaker.failed(now_s, rule, ejected=by is not None and self._room() > 0)
        self._keep(instance_id, after, now_s)
        if after.state is BreakerState.OPEN and breaker.state is not BreakerState.OPEN and by is not None:
            self._reasons[instance_id] = failure.reason
            self._window.forget(instance_id)
            self._on_ejection(instance_id, by)
            self._warn(
                f"instance {instance_id} is avoided for {after.retry_at_s - now_s:.0f} s: {own.faults} of its last"
                f" {own.total} requests failed, {100 * peers.share:.1f} % of the others' did; {breaker.faults + 1} in a"
                f" row; the last one: {failure}"
            )

    def busy(self, instance_id: str, named_s: float | None, now_s: float) -> None:
        """The instance takes nothing, for as long as it names: it works, and is no outlier."""
        until_s = now_s + pause_s(named_s)
        self._busy_until_s[instance_id] = max(until_s, self._busy_until_s.get(instance_id, until_s))
        breaker = self._kept.get(instance_id, _CLOSED)
        self._keep(instance_id, breaker.ended_without_evidence(now_s), now_s)

    # for people ------------------------------------------------------------------------------------------------
    def states(self) -> dict[str, BreakerState]:
        """Breakers that are not closed."""
        return {name: kept.state for name, kept in self._kept.items() if kept.state is not BreakerState.CLOSED}

    def avoided(self, now_s: float) -> dict[str, Avoided]:
        """Instances that get no requests, or trials alone, and why."""
        found = {
            name: Avoided(kept.state.value, self._reasons.get(name, ""), max(0.0, kept.retry_at_s - now_s))
            for name, kept in self._kept.items()
            if kept.state is not BreakerState.CLOSED
        }
        for name, until_s in self._busy_until_s.items():
            if now_s < until_s and name not in found:
                found[name] = Avoided("busy", "busy", until_s - now_s)
        return found

    def failing(self) -> frozenset[str]:
        """Instances that fail every request, ejected or not."""
        return frozenset(
            name
            for name, kept in self._kept.items()
            if kept.state is not BreakerState.CLOSED or kept.faults >= self._rule.fault_limit
        )

    @property
    def panics(self) -> bool:
        """Whether ejections are ignored, as more instances are ejected than may be."""
        return bool(self.troubled) and self._panics()

    # bookkeeping -----------------------------------------------------------------------------------------------
    def forget_all_but(self, instance_ids: Mapping[str, object]) -> None:
        """Drop what is kept about instances that left the fleet."""
        for kept in (self._kept, self.troubled, self._reasons, self._busy_until_s):
            for instance_id in kept.keys() - instance_ids.keys():
                del kept[instance_id]
        self._window.keep_only(instance_ids)

    def _keep(self, instance_id: str, breaker: Breaker, now_s: float) -> None:
        if breaker.is_new(now_s, self._rule):
            self._kept.pop(instance_id, None)
        else:
            self._kept[instance_id] = breaker
        busy_until_s = self._busy_until_s.get(instance_id, -math.inf)
        if busy_until_s <= now_s:
            self._busy_until_s.pop(instance_id, None)
        if breaker.state is not BreakerState.CLOSED:
            self.troubled[instance_id] = max(breaker.retry_at_s, busy_until_s)
        elif busy_until_s > now_s:
            self.troubled[instance_id] = busy_until_s
        else:
            self.troubled.pop(instance_id, None)
