"""The fleet's record of its scaling: the last decision, its outcome, and which instances are spares."""

from __future__ import annotations

from dataclasses import KW_ONLY, replace
from enum import StrEnum

from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.values import documented, value


class DecisionStatus(StrEnum):
    """The outcome of a decision."""

    OPEN = "open"
    """The decision is being carried out: a new leader continues."""
    DONE = "done"
    FAILED = "failed"
    """The decision was not carried out in full; the next one is made by what is there then."""
    WITHDRAWN = "withdrawn"
    """The load returned while instances drained: they serve again."""
    PUBLISHED = "published"
    """The size is published alone: something outside of the fleet scales."""


@value
class ScaleRecord:
    """The fleet's scaling as of the last decision: of its decode instances, or of all others."""

    _: KW_ONLY
    role: str = documented("`decode` in the record of the decode instances; else empty", default="")
    decision_id: int = documented("number of the last decision, 1 is the first", default=0)
    at_ms: int = documented("when it was made", default=0)
    by: str = documented("worker that made it", default="")
    bounds: str = documented("`MIN:MAX` of that worker's settings", default="")
    size: int = documented("instances that were ready or starting then", default=0)
    wanted: int = documented("instances wanted", default=0)
    reason: str = documented("why", default="")
    status: DecisionStatus = documented("open, done, failed, withdrawn or published", default=DecisionStatus.DONE)
    outcome: str = documented("what came of it, in words", default="")
    starting: tuple[str, ...] = documented("instances that it makes ready", default=())
    leaving: tuple[str, ...] = documented("instances that it drains", default=())
    spares: tuple[str, ...] = documented("parked instances that the autoscaler may start", default=())
    asked: int = documented("how often the actuator was called for it", default=0)
    accepted: int = documented("1 once the actuator has accepted it", default=0)

    @property
    def counts(self) -> str:
        """The role that it counts, as metrics name it: all that is not ``decode`` prefills."""
        return self.role or Role.PREFILL.value

    @property
    def is_open(self) -> bool:
        return self.status is DecisionStatus.OPEN

    def closed(self, status: DecisionStatus, outcome: str) -> ScaleRecord:
        return replace(self, status=status, outcome=outcome)


@value
class ScaleEntry:
    """One line of the readable log."""

    at_ms: int
    decision_id: int
    event: str
    """decided, accepted, refused, ready, or a status."""
    text: str
